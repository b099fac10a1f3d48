"""The kernels of ``multi.py``, ``paged_multi.py`` and theirs over E4M3 with one work tile a CTA.

    the CTAs of a cluster split the keys of a tile, and combine through distributed shared memory

Where tiles alone do not fill the machine, the CTAs of a cluster take a split of a tile's keys each. When they are
through, every CTA puts its output and row statistics into its shared memory and adds up a slice of all of theirs: no
partial result goes through device memory, nothing is counted, and no CTA waits for one that may not be running. Where
tiles do fill the machine, two CTAs may form a ``pair`` on neighbouring tiles: each loads half of every block for both,
by multicast.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from . import multi_combine
from .mainloop import Consumer
from .multi import Collective, SharedMemory, launch_shape
from .multi_blocks import WorkTile
from .multi_schedule import Sequences
from .multi_types import Layouts, Outputs, Scalars


class SingleTile:
    """The kernel: a CTA finds its work tile, some warps load it, the others attend and combine."""

    def __init__(self, config: Any, collective: Collective, sequences: Sequences):
        self.c, self.of, self.sequences = config, collective, sequences
        self.multi, self.mainloop = collective.multi, collective.multi.mainloop
        self.regs_load, self.regs_mma = collective.registers
        assert config.partial_bytes <= config.staged_bytes, config

    @cute.jit
    def __call__(self, ins: Any, outs: Outputs, scalars: Scalars, stream: Any):
        layouts, mmas = self.of.layouts(), self.mainloop.mmas()
        ctas = self.sequences.clusters(ins) * scalars.ctas
        self.kernel(self.of.loads(ins, layouts), ins, outs, scalars, layouts, *mmas).launch(
            grid=[ctas, 1, 1], cluster=[scalars.ctas, 1, 1], stream=stream, **launch_shape(self.c)
        )

    @cute.kernel
    def kernel(
        self, loads: Any, ins: Any, outs: Outputs, scalars: Scalars, layouts: Layouts, qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self.of.shared_memory(cutlass.memory.SmemAllocator(), warp, layouts)
        if warp == 0:
            self.of.prefetch(loads)
        tile, sequence, there = self.sequences.work_tile(ins, scalars)
        cute.arch.mbarrier_init_fence()
        if const_expr(self.c.pair):
            self._sync_cluster()  # neither CTA may write to the other before its barriers stand
        else:
            cute.arch.sync_threads()
        if there:
            if warp < 4:
                cute.arch.setmaxregister_decrease(self.regs_load)
                if warp < self.c.loader_warps:
                    self.of.produce(loads, ins, tile, sequence, smem, Int32(0))
                elif const_expr(self.c.turning_warps):
                    self.of.turn(scalars, tile, smem, Int32(0))
                self._idle_through_combine(scalars)
            else:
                cute.arch.setmaxregister_increase(self.regs_mma)
                rows, results = self.of.rows(ins, outs, tile, sequence)
                w = self.multi.consumer(scalars, smem, qk_mma, pv_mma)
                self.mainloop.begin_turns(w)
                here, sums = self.of.attend(w, rows, scalars, tile, smem, Int32(0))
                self.finish(here, sums, rows, results, scalars, tile, smem)

    def _sync_cluster(self) -> None:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def _idle_through_combine(self, scalars: Scalars):
        """The producer's part where ``finish`` synchronises the cluster."""
        if scalars.ctas > 1:
            self._sync_cluster()
            if const_expr(not self.c.pair):
                self._sync_cluster()

    @cute.jit
    def finish(
        self, w: Consumer, sums: list, rows: Any, outs: Outputs, scalars: Scalars, tile: WorkTile, smem: SharedMemory
    ):
        """Write the rows out, alone or together with the other CTAs of the cluster."""
        c = self.c
        if const_expr(c.pair):
            multi_combine.store(c, w, rows, outs, tile, sums)
            self._sync_cluster()  # neither CTA may leave while the other still writes to its memory
        else:
            if scalars.ctas == 1:
                multi_combine.store(c, w, rows, outs, tile, sums)
            else:
                self.multi.await_consumers()
                multi_combine.publish(c, w, smem.partial, sums)
                self._sync_cluster()
                multi_combine.combine(c, rows, outs, scalars, tile, smem.partial)
                self._sync_cluster()  # nor may one whose memory another still reads
