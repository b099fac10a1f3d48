"""K and V of E4M3 beside queries of 16 bits on Blackwell, widened by the two warps behind that of loads.

TMA -> (N, D) bytes as they come -> 2 warps (``prefill/widen.py``) -> (N, D) as products take them

ring                 producer (arrivals)               consumers (arrivals)
staged k, staged v   TMA 1, of ``Config.staged``       2 warps
k, v                 2 warps, of ``Config.stages``     tcgen05.commit 1
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from torch_attnkit.cuda.ring import Fixed, Ring

from ..types import Scalars
from ..widen import widen
from .scheduler import Scheduler
from .types import OneCta, SharedMemory


class WidenKV(Fixed):
    def __init__(self, config: OneCta, scheduler: Scheduler):
        self.c, self.scheduler = config, scheduler

    def stages(self, memory: Any) -> dict[str, cute.Tensor]:
        """Of K and V as they come, as fields of ``SharedMemory``."""
        c, made = self.c, {}
        for name, dim in (("staged_k", c.dim), ("staged_v", c.dim_v)):
            layout = cute.make_ordered_layout((c.tile_n, dim, c.staged), order=(1, 0, 2))
            made[name] = memory.allocate_tensor(Uint8, layout, 128)
        return made

    @cute.jit
    def run(self, scalars: Scalars, smem: SharedMemory, warp: Int32):
        """One warp: its part of all blocks, V one behind K, as they are loaded and multiplied."""
        c, rings = self.c, smem.rings
        fill, n = Int32(0), Int32(0)
        tile = self.scheduler.read(rings.tile, smem.sTile, fill)
        while tile.row >= 0:
            visit = self.scheduler.key_blocks(tile, scalars)
            for i in cutlass.range(0, visit.steps + 1, unroll=1):
                if i < visit.steps:
                    self._block((rings.staged_k, smem.staged_k), (rings.k, smem.sK), n + i, c.dim, warp)
                if i > 0:
                    self._block((rings.staged_v, smem.staged_v), (rings.v, smem.sV), n + i - 1, c.dim_v, warp)
            n += visit.steps
            fill += 1
            tile = self.scheduler.read(rings.tile, smem.sTile, fill)

    def _block(self, source: tuple[Ring, Any], target: tuple[Ring, Any], n: Int32, dim: int, warp: Int32) -> None:
        """Fill n of a ring over bytes into that of another over as many elements."""
        c = self.c
        (ring, staged), (filled, wide) = source, target
        nbytes = c.tile_n * dim
        ring.wait(n)
        filled.await_empty(n)
        from_, to = staged.iterator.toint() + ring.slot(n) * nbytes, wide.iterator.toint() + filled.slot(n) * 2 * nbytes
        widen(from_, to, c.tile_n, dim, c.dtype, warp, c.widen_warps)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        ring.release(n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(filled.full + filled.slot(n))
