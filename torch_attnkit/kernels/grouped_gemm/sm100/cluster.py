"""CTA clusters of the block-scaled GEMM: 2-CTA MMA, and TMA multicast between neighbouring tiles.

A pair of CTAs may multiply a tile of twice as many tokens: each has half of the tokens and of the accumulators, and
loads half of the rows of every row tile of weights; the first issues the MMAs for both. Two neighbouring tiles may
share loads by multicast: other rows of weights times the same tokens, of which each loads half for both; or the same
rows times other tokens of the same expert, where each loads half of the weights for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm100 import block_scaled, block_scaled_pairs

from ..arguments import Tensors
from ..work_tiles import WorkTile
from .config import TOKENS, Config


class CtaCoord(NamedTuple):
    """Coordinates of a CTA in its cluster."""

    rank: Int32  # in its pair
    neighbour: Int32  # whose work tile it has


def ceil_div(count: Int32, each: int) -> Int32:
    """``each``: a power of two, so that a shift does it, where a division looks at signs."""
    return (count + (each - 1)) >> (each.bit_length() - 1)


@dataclass
class ClusterScheduler(Fixed):
    """Static scheduler: a CTA's tiles, every so many-th of the groups of one or two that a cluster multiplies at a
    time; an expert's are consecutive. Unsigned division takes fewer instructions."""

    block: Uint32
    blocks: Uint32
    row_tiles: Uint32  # of which a cluster has one, or neighbours
    count: Int32
    coord: CtaCoord
    rows: int  # row tiles, of those, that neighbours have
    tokens: int  # tiles of tokens that they have

    def row(self, tile_idx: Int32) -> Int32:
        """As in the work tile."""
        return self._row(self._unit(tile_idx) % self.row_tiles)

    def tile(self, tensors: Tensors, tile_idx: Int32) -> WorkTile:
        """With this CTA's tokens, perhaps none."""
        unit = self._unit(tile_idx)
        tokens = unit // self.row_tiles
        line, beyond = Int32(tokens) + 1, False
        if self.tokens > 1:
            line, beyond = self._line(tensors, tokens, self.coord.neighbour)
        expert, first, columns = (tensors.tiles[line, i] for i in range(3))
        before = self.coord.rank * TOKENS
        present = cutlass.max(cutlass.min(columns - before, TOKENS), Int32(0))
        if self.tokens > 1:
            present = cutlass.select_(beyond, Int32(0), present)
        return WorkTile(expert, first + before, present, self._row(unit - tokens * self.row_tiles))

    def apart(self, tensors: Tensors, tile_idx: Int32) -> cutlass.Boolean:
        """Whether neighbours that might share weights have tokens of two experts."""
        tokens = self._unit(tile_idx) // self.row_tiles
        a, b = (tensors.tiles[self._line(tensors, tokens, Int32(i))[0], 0] for i in range(2))
        return a != b

    def _line(self, tensors: Tensors, tokens: Uint32, neighbour: Int32) -> tuple[Int32, cutlass.Boolean]:
        """Of ``tiles``; behind the last work tile a neighbour has its line, but no tokens."""
        line = Int32(tokens) * self.tokens + neighbour + 1
        return cutlass.min(line, tensors.tiles[0, 0]), line > tensors.tiles[0, 0]

    def _row(self, row: Uint32) -> Int32:
        return Int32(row) * self.rows + (self.coord.neighbour if self.rows > 1 else 0)

    def _unit(self, tile_idx: Int32) -> Uint32:
        return self.block + Uint32(tile_idx) * self.blocks


class Cluster:
    """The CTAs of a cluster: synchronisation, and the instructions that depend on its shape."""

    def __init__(self, config: Config):
        self.ctas, self.neighbours, self.shared = config.ctas, config.neighbours, config.shared
        self.size, self.two = self.ctas * self.neighbours, self.ctas > 1
        self.cta_group = tcgen05.CtaGroup.TWO if self.two else tcgen05.CtaGroup.ONE
        self.products = block_scaled_pairs if self.two else block_scaled

    def coord(self) -> CtaCoord:
        """Of this CTA."""
        at = cute.arch.block_idx()[0] & (self.size - 1)
        return CtaCoord(at & (self.ctas - 1), at >> (self.ctas - 1))

    def share(self, tensors: Tensors, row_tiles: Int32) -> ClusterScheduler:
        """``row_tiles``: of an expert's weights, those of a work tile counted as one."""
        block, blocks = (Uint32(x) // self.size for x in (cute.arch.block_idx()[0], cute.arch.grid_dim()[0]))
        rows, tokens = (self.neighbours if self.shares(what) else 1 for what in ("tokens", "weights"))
        each = Uint32(row_tiles) // rows
        units = Uint32(ceil_div(tensors.tiles[0, 0], tokens)) * each
        # Blocks that have none are fewer than all.
        count = (units + (blocks - 1) - block) // blocks
        return ClusterScheduler(block, blocks, each, Int32(count), self.coord(), rows, tokens)

    def shares(self, what: str) -> bool:
        """Whether neighbours do: "tokens" or "weights"."""
        return self.neighbours > 1 and self.shared == what

    def load(self, what: str) -> Any:
        """TMA to a CTA's own shared memory, or multicast to neighbours; it completes on the barrier of a pair's first
        CTA."""
        if self.shares(what):
            return cpasync.CopyBulkTensorTileG2SMulticastOp(self.cta_group)
        return cpasync.CopyBulkTensorTileG2SOp(self.cta_group)

    def to_neighbours(self, what: str, apart: Any = False) -> dict[str, Any]:
        """Arguments of such a load; one that is ``apart`` is for this CTA alone."""
        if not self.shares(what):
            return {}
        coord = self.coord()
        mask = Int32(1 | 1 << self.ctas) << coord.rank
        if apart is not False:
            mask = cutlass.select_(apart, Int32(1) << (coord.neighbour * self.ctas + coord.rank), mask)
        return {"mcast_mask": cutlass.Int16(mask)}

    @cute.jit
    def sync(self):
        """All threads."""
        if const_expr(self.size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """A thread, on the barrier of its pair's first CTA."""
        if const_expr(self.two):
            cute.arch.mbarrier_arrive(barrier, self._first(), scope=nvvm.MemScopeKind.CLUSTER)
        else:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def announce(self, barrier: cute.Pointer, nbytes: Int32):
        """A warp: expect so many bytes in this CTA."""
        with cute.arch.elect_one():
            if const_expr(self.two):
                scope = nvvm.MemScopeKind.CLUSTER
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes, self._first(), scope=scope)
            else:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)

    @cute.jit
    def commit(self, barrier: cute.Pointer, to_all: cutlass.Constexpr):
        """The MMA thread: arrive at the barriers of its pair's CTAs, or of all CTAs, when the MMAs so far have
        completed."""
        if const_expr(to_all and self.size > 1):
            tcgen05.commit(barrier, cutlass.Int16((1 << self.size) - 1), self.cta_group)
        elif const_expr(self.two):
            tcgen05.commit(barrier, cutlass.Int16(3 << self._first()), self.cta_group)
        else:
            tcgen05.commit(barrier)

    def _first(self) -> Int32:
        """The first CTA of the pair."""
        return self.coord().neighbour * self.ctas
