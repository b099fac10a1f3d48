"""Tiles of the prefill kernel by ``mma.sync``, by head size: in 99 KB of shared memory and 255 registers a thread."""

from __future__ import annotations

from typing import Any, NamedTuple

DTYPES, CODES = "bf16 f16", "f8e4m3"
ATOM, WARP = 16, 32  # rows of a product; threads
MOST_IN_REGISTERS = 128  # columns of Q that a warp keeps in registers; of more it reads each again for every block
FEW = 64  # rows of a sequence's KV head, up to which a tile has no more


class MmaTile(NamedTuple):
    """Rows of Q, keys of a block, stages of K and V, and products of 16 rows that a warp has one behind the other."""

    tile_m: int
    tile_n: int
    stages: int
    atoms: int = 1

    def sizes(self) -> dict[str, Any]:
        return {"tile_m": self.tile_m, "tile_n": self.tile_n, "stages": self.stages, "atoms": self.atoms}


class MmaTiles(NamedTuple):
    many: MmaTile
    few: MmaTile


# (D, Dv): D a multiple of 16, Dv of 32, which the epilogue stores. Built for an H200, the time of PyTorch's FA2
# over ours: 4x4096 with all keys and causal, 1x16384 likewise (docs/lab/prefill.md). Two products of 16 rows halve what
# a warp reads of shared memory: D 128, 4x4096 with all keys 3115 us for 3992 with one, and 64 keys a block.
MMA_TILES: dict[tuple[int, int], MmaTiles] = {
    (32, 32): MmaTiles(MmaTile(256, 64, 2, 2), MmaTile(64, 64, 4)),  # not timed
    (64, 64): MmaTiles(MmaTile(256, 64, 2, 2), MmaTile(64, 64, 4)),  # 1.05 1.13 1.07 1.13
    (96, 96): MmaTiles(MmaTile(128, 48, 2, 2), MmaTile(64, 48, 3)),  # 0.95 0.94 0.93 1.00
    (128, 128): MmaTiles(MmaTile(128, 32, 2, 2), MmaTile(64, 32, 4)),  # 1.02 1.10 1.00 1.05
    (192, 128): MmaTiles(MmaTile(128, 32, 2), MmaTile(64, 32, 3)),  # no such peer
    (256, 256): MmaTiles(MmaTile(64, 32, 2), MmaTile(64, 32, 2)),  # 0.81 0.85 0.82 0.86
}
# Of E4M3, whose operands take registers to be converted: D 96 and 128 spill with two products. Not timed.
MMA_TILES_FP8: dict[tuple[int, int], MmaTiles] = {
    **MMA_TILES,
    (96, 96): MmaTiles(MmaTile(128, 48, 2), MmaTile(64, 48, 3)),
    (128, 128): MmaTiles(MmaTile(128, 32, 2), MmaTile(64, 32, 4)),
}
# Of E4M3 beside queries of 16 bits, which has a block widened beside its stages; D 128 spills with two. Not timed.
MMA_TILES_FP8_KV: dict[tuple[int, int], MmaTiles] = {
    **MMA_TILES,
    (128, 128): MMA_TILES_FP8[128, 128],
    (256, 256): MmaTiles(MmaTile(64, 16, 4), MmaTile(64, 16, 4)),
}


def mma_tile(table: dict[tuple[int, int], MmaTiles], dim: int, dim_v: int, rows: int) -> MmaTile:
    """For ``rows`` rows of a sequence's KV head at most."""
    tiles = table[dim, dim_v]
    return tiles.few if rows <= FEW else tiles.many
