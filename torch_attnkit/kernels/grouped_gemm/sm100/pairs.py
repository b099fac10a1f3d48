"""What is different where two CTAs multiply a work tile of twice as many tokens: each has half of the tokens, and their
sums, and loads half of the rows of every row tile of weights. The first one multiplies for both. Imports cutlass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05

from torch_attnkit.cuda.sm100 import block_scaled, block_scaled_pairs

from ..sm90.arguments import Tensors
from ..sm90.schedule import Work, WorkTile
from .config import TOKENS

_BOTH = 3  # CTAs of a pair, in a mask


class Share(NamedTuple):
    """A CTA's part of a pair's work tiles."""

    rank: Int32
    work: Work

    @property
    def count(self) -> Int32:
        return self.work.count

    def row(self, turn: Int32) -> Int32:
        """As in the work tile."""
        return (self.work.block + turn * self.work.blocks) % self.work.row_tiles

    def tile(self, tensors: Tensors, turn: Int32) -> WorkTile:
        """The tokens that are this CTA's, perhaps none."""
        tile = self.work.tile(tensors, turn)
        before = self.rank * TOKENS
        columns = cutlass.max(cutlass.min(tile.columns - before, TOKENS), Int32(0))
        return tile._replace(first=tile.first + before, columns=columns)


def share(ctas: int, tensors: Tensors, row_tiles: Int32) -> Share:
    block, blocks = cute.arch.block_idx()[0] // ctas, cute.arch.grid_dim()[0] // ctas
    units = tensors.tiles[0, 0] * row_tiles
    count = cutlass.max((units - block + blocks - 1) // blocks, Int32(0))
    rank = cute.arch.block_idx()[0] % ctas if ctas > 1 else Int32(0)
    return Share(rank, Work(block, blocks, row_tiles, count))


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
