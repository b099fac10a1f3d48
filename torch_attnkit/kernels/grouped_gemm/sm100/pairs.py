"""What is different where two CTAs multiply a work tile of twice as many tokens: each has half of the tokens, and their
sums, and loads half of the rows of every row tile of weights. The first one multiplies for both. Imports cutlass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda.sm100 import block_scaled, block_scaled_pairs

from ..sm90.arguments import Tensors
from ..sm90.schedule import WorkTile
from .config import TOKENS

_BOTH = 3  # CTAs of a pair, in a mask


def parts(count: Int32, each: int) -> Int32:
    """How many of ``each``, a power of two, hold ``count``: a shift, where a division looks at signs."""
    return (count + (each - 1)) >> (each.bit_length() - 1)


class Share(NamedTuple):
    """The work tiles of a CTA, or of a pair: every ``blocks``-th, of which those of an expert follow each other. Numbers
    without a sign are divided by fewer instructions."""

    block: Uint32
    blocks: Uint32
    row_tiles: Uint32
    count: Int32
    rank: Int32  # of the CTA in its pair

    def row(self, turn: Int32) -> Int32:
        """As in the work tile."""
        return Int32(self._unit(turn) % self.row_tiles)

    def tile(self, tensors: Tensors, turn: Int32) -> WorkTile:
        """With the tokens that are this CTA's, perhaps none."""
        unit = self._unit(turn)
        tokens = unit // self.row_tiles
        expert, first, columns = (tensors.tiles[Int32(tokens) + 1, i] for i in range(3))
        before = self.rank * TOKENS
        mine = cutlass.max(cutlass.min(columns - before, TOKENS), Int32(0))
        return WorkTile(expert, first + before, mine, Int32(unit - tokens * self.row_tiles))

    def _unit(self, turn: Int32) -> Uint32:
        return self.block + Uint32(turn) * self.blocks


def share(ctas: int, tensors: Tensors, row_tiles: Int32) -> Share:
    rank, block, blocks = Int32(0), *(Uint32(x) for x in (cute.arch.block_idx()[0], cute.arch.grid_dim()[0]))
    if ctas > 1:
        rank, block, blocks = Int32(block % ctas), block // ctas, blocks // ctas
    units = Uint32(tensors.tiles[0, 0] * row_tiles)
    # Blocks that have none are fewer than all.
    count = (units + (blocks - 1) - block) // blocks
    return Share(block, blocks, Uint32(row_tiles), Int32(count), rank)


class Group:
    """``ctas`` that multiply together, one or two: how they meet, and which instructions they take."""

    def __init__(self, ctas: int):
        self.ctas, self.two = ctas, ctas > 1
        self.group = tcgen05.CtaGroup.TWO if self.two else tcgen05.CtaGroup.ONE
        self.products = block_scaled_pairs if self.two else block_scaled

    def load(self) -> Any:
        """TMA to a CTA's own memory, which the first one's barrier hears of."""
        return cpasync.CopyBulkTensorTileG2SOp(self.group)

    @cute.jit
    def meet(self):
        """All threads."""
        if const_expr(self.two):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def arrive(self, barrier: cute.Pointer):
        """A thread, on the first CTA's barrier."""
        if const_expr(self.two):
            cute.arch.mbarrier_arrive(barrier, Int32(0), scope=nvvm.MemScopeKind.CLUSTER)
        else:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def announce(self, barrier: cute.Pointer, nbytes: Int32):
        """A warp: so many bytes will come to this CTA, of which the first one's barrier hears."""
        with cute.arch.elect_one():
            if const_expr(self.two):
                scope = nvvm.MemScopeKind.CLUSTER
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes, Int32(0), scope=scope)
            else:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)

    @cute.jit
    def commit(self, barrier: cute.Pointer):
        """The thread that multiplies: arrive at every CTA's barrier when the products so far are done."""
        if const_expr(self.two):
            tcgen05.commit(barrier, cutlass.Int16(_BOTH), self.group)
        else:
            tcgen05.commit(barrier)
