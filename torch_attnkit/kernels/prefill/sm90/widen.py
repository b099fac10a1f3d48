"""K and V of E4M3 beside queries of 16 bits, widened by warps of the producer.

    TMA -> (N, D) bytes as they come -> 3 warps (``prefill/widen.py``) -> (N, D) as products take them

K becomes what q is, V float16, whose products with probabilities are the more exact ones. Scores and probabilities are
not rounded to E4M3, and V needs no transposition. From memory come half of the bytes of 16 bits; products take as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from torch_attnkit.cuda.ring import Fixed, Ring, rings

from ..widen import widen
from .config import Config, GroupScalars, Layouts
from .load_tma import SharedMemory, SingleFill
from .mainloop import Mainloop, Stages
from .seqlen import WorkTile


@dataclass
class StagedKV(Fixed):
    """K and V as they come, (N, D, stages) bytes, and their rings."""

    k_ring: Ring
    k_stages: cute.Tensor
    ring: Ring
    stages: cute.Tensor


class WidenKV(Fixed):
    """In the producer: the warps behind the first take blocks of K and V in turn as they come, and leave them widened.

    ring                 producer (arrivals)                     consumers (arrivals)
    staged k, staged v   TMA 1, of ``Config.stages``             3 warps, of both CTAs of a pair
    k, v                 3 warps, of two stages                  4 warps of each consumer
    """

    def __init__(self, config: Config, mainloop: Mainloop):
        self.c, self.mainloop = config, mainloop

    def shared_memory(self, memory: Any, warp: Int32, layouts: Layouts) -> SharedMemory:
        """With the stages of K and V as they come behind the others."""
        c = self.c
        consumers = 4 * c.consumers
        table = (
            ("k", c.k_stages, c.convert_warps, consumers),
            ("v", c.v_stages, c.convert_warps, consumers),
            ("staged_k", c.stages, 1, c.convert_warps * c.ctas),
            ("staged_v", c.stages, 1, c.convert_warps * c.ctas),
        )
        found = rings(memory, warp, table)
        stages = Stages(SingleFill(), found["k"], found["v"], *self.mainloop.operands(memory, layouts))
        staged: list[Any] = []
        for name, dim in (("staged_k", c.dim), ("staged_v", c.dim_v)):
            layout = cute.make_ordered_layout((c.tile_n, dim, c.stages), order=(1, 0, 2))
            ring = Ring(found[name].full, found[name].empty, c.stages, c.pair)
            staged += [ring, memory.allocate_tensor(Uint8, layout, 128)]
        return SharedMemory(stages, StagedKV(*staged))

    @cute.jit
    def run(self, scalars: GroupScalars, tile: WorkTile, smem: SharedMemory, fills: Int32):
        """All blocks of a work tile; ``fills`` of every ring were before."""
        c, stages, staged = self.c, smem.stages, smem.staged
        for step in cutlass.range(tile.first, tile.stop, unroll=1):
            n = fills + step - tile.first
            self._block((staged.k_ring, staged.k_stages), (stages.ring_k, stages.sK), n, c.dim, c.dtype)
            self._block((staged.ring, staged.stages), (stages.ring_v, stages.sV), n, c.dim_v, c.v_dtype)

    def _block(self, source: tuple, target: tuple, n: Int32, dim: int, dtype: Any) -> None:
        """Fill n of a ring over (N, dim, stages) bytes into that of another over as many elements."""
        c = self.c
        (ring, staged), (filled, wide) = source, target
        nbytes = c.tile_n * dim
        from_ = staged.iterator.toint() + ring.slot(n) * nbytes
        to = wide.iterator.toint() + filled.slot(n) * (2 * nbytes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 1
        ring.wait(n)
        filled.await_empty(n)
        widen(from_, to, c.tile_n, dim, dtype, warp, c.convert_warps)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        ring.release(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(filled.full + filled.slot(n))
