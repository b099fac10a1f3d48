"""Tile shapes of the FP4 batched GEMM on Blackwell. 16 bits are by ``mma.sync``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problem import Fp4Problem

ROWS = 128  # of a work tile's first operand: the lanes of tensor memory
STEP_BYTES = 128  # of a packed row in a stage: 256 elements
COLUMNS = (8, 16, 32, 64, 128, 256)  # that a work tile's second operand may have
_SHARED = 224 << 10  # of a block, without barriers
_TENSOR_COLUMNS = 512
_MOST_STAGES = 8
_TILE_BYTES, _TILE_COLUMNS = 512, 4  # of four scales of 128 rows: in shared memory, and in tensor memory
_TILES = {"nvfp4": 4, "mxfp4": 2}  # of a stage and 128 rows
# Of a multiprocessor, by count: products of FP4 elements in a clock, and bytes that it gets from L2.
_PRODUCTS, _L2 = 16384, 40
# Instructions, and so clocks, that 32 columns of sums take to be stored: a thread has a token's neighbouring features
# and stores them together, or a feature of several tokens and stores each by itself.
_STORED = {True: 60, False: 160}
# Slices of K that there may be, of up to so many columns; and clocks for a cluster to start, meet and read its sums: a
# microsecond, as on Hopper.
_SLICES, _MOST_SLICED, _CLUSTER_SYNC = 2, 64, 1900


@dataclass(frozen=True)
class Fp4Tile:
    """A CTA has 128 rows x ``columns`` outputs at a time: rows are tokens or features, columns the others."""

    format: str
    columns: int
    tokens_are_rows: bool
    whole: bool  # scales are whole tiles of the 128x4 layout, which bulk copies load
    slices: int = 1  # of K: blocks of a cluster, which have one work tile and add up their sums
    early: bool = True  # whether the launch begins while the one before it ends

    @property
    def column_tiles(self) -> int:
        """Of 128 columns' scales."""
        return -(-self.columns // ROWS)

    @property
    def tiles(self) -> int:
        """Of scales along K, of a stage."""
        return _TILES[self.format]

    @property
    def scale_bytes(self) -> int:
        """Of a stage's scales of 128 rows."""
        return self.tiles * _TILE_BYTES

    @property
    def code_bytes(self) -> int:
        """Of a stage."""
        return (ROWS + self.columns) * STEP_BYTES

    @property
    def buffers(self) -> int:
        """Accumulators in tensor memory: one is stored while the other is multiplied."""
        return 2 if 2 * self.columns <= _TENSOR_COLUMNS // 2 else 1

    @property
    def scale_columns(self) -> int:
        """Of tensor memory, for 128 rows of a stage."""
        return self.tiles * _TILE_COLUMNS

    @property
    def stages(self) -> int:
        """As many as both memories hold: a stage has columns of tensor memory of its own for its scales."""
        parts = 1 + self.column_tiles
        shared = (_SHARED - self.sum_bytes) // (self.code_bytes + parts * self.scale_bytes)
        return min(_MOST_STAGES, shared, (_TENSOR_COLUMNS - self.first_scales) // (parts * self.scale_columns))

    @property
    def sum_bytes(self) -> int:
        """Of shared memory, by which CTAs of a cluster read each other's partial sums."""
        return ROWS * self.columns * 4 if self.slices > 1 else 0

    @property
    def first_scales(self) -> int:
        """The column of tensor memory behind the sums."""
        return -(-self.buffers * self.columns // 32) * 32

    @property
    def threads(self) -> int:
        """Four warps that store, one that loads, one that multiplies; two that rest, and four that load scales."""
        return 32 * (6 if self.whole else 12)


def fp4(problem: Fp4Problem, whole: bool, sms: int) -> Fp4Tile:
    """The tile with the least estimated time. Few tokens are columns, for columns may be few."""
    p = problem

    def made(tokens_are_rows: bool) -> list[Fp4Tile]:
        others = p.n if tokens_are_rows else p.tokens
        # A work tile whose columns are no multiple of 128 has all of them: the scales of 128 are copied as one tile.
        fitting = [c for c in COLUMNS if c % ROWS == 0 or c >= others]
        found = [Fp4Tile(p.format, c, tokens_are_rows, whole) for c in fitting]
        if not tokens_are_rows and p.k > 2 * STEP_BYTES * _SLICES:
            few = [t for t in found if t.columns <= _MOST_SLICED and _tiles(p, t) * _SLICES <= sms]
            found += [replace(t, slices=_SLICES) for t in few]
        return found

    def cost(tile: Fp4Tile) -> float:
        tiles = _tiles(p, tile)
        steps = -(-p.k // (64 * tile.slices))
        work = steps * max(ROWS * tile.columns * 64 / _PRODUCTS, (ROWS + tile.columns) * 32 / _L2)
        stored = tile.columns / 32 * _STORED[tile.tokens_are_rows]
        waves = -(-tiles // sms)
        sync = _CLUSTER_SYNC if tile.slices > 1 else 0
        return waves * (max(work, stored) if tile.buffers == 2 else work + stored) + sync

    return min(made(False) + made(True), key=cost)


def _tiles(p: Fp4Problem, tile: Fp4Tile) -> int:
    """Work tiles."""
    rows, columns = (p.tokens, p.n) if tile.tokens_are_rows else (p.n, p.tokens)
    return p.groups * -(-rows // ROWS) * -(-columns // tile.columns)
