"""The kernels of ``multi.py``, ``paged_multi.py`` and theirs over E4M3 with persistent CTAs, for ragged batches.

    producer  --K and V of one work tile after another-->  rings  -->  consumers: a tile's rows, stored or a split
    who ends the last split of a tile adds the others, which lie in device memory (``multi_splits.py``)

CTAs have equal runs of all blocks of keys (``multi_schedule.py``), where those of a cluster each have a split of one
sequence, and a batch takes as long as its longest. The producer goes on to the next work tile while the consumers end
the last.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from torch_attnkit.cuda.ring import Fixed, Ring, rings

from . import multi_combine, multi_splits
from .multi import Collective, SharedMemory, launch_shape
from .multi_schedule import NOTE, Part, Scheduler, Sequences
from .multi_types import Layouts, Outputs, Scalars, SplitWorkspace

# Registers per thread of the producer's and the consumers' warpgroups, by (consumers, CTAs on a multiprocessor): the
# producer's has a scheduler.
_REGISTERS = {(1, 1): (96, 256), (1, 2): (48, 208)}
_REGISTERS_TURNING = {(1, 1): (96, 256), (1, 2): (56, 200)}  # where other warps of it turn V around
_PARTS = 2  # that the producer may be ahead


class Parts(Fixed):
    """What the producer tells the consumers: one part of the CTA's run after another, and -1 behind the last."""

    def __init__(self, ring: Ring, sParts: cute.Tensor):
        self.ring, self.sParts = ring, sParts  # (NOTE, _PARTS), Int32

    def tell(self, n: Int32, note: list[Int32]) -> None:
        full = self.ring.await_empty(n)
        with cute.arch.elect_one():
            for i, value in enumerate(note):
                self.sParts[i, self.ring.slot(n)] = value
            cute.arch.mbarrier_arrive(full)

    def wait(self, n: Int32) -> Int32:
        """The part's first number, when it is there."""
        self.ring.wait(n)
        return cute.arch.make_warp_uniform(self.sParts[0, self.ring.slot(n)])

    def read(self, n: Int32) -> list[Int32]:
        return [cute.arch.make_warp_uniform(self.sParts[i, self.ring.slot(n)]) for i in range(NOTE)]


class Persistent:
    """The kernel: a producer goes through its CTA's run of blocks, the others have its parts from it."""

    def __init__(self, config: Any, collective: Collective, sequences: Sequences):
        self.c, self.of, self.mainloop = config, collective, collective.multi.mainloop
        self.await_consumers = collective.multi.await_consumers
        self.scheduler = Scheduler(config, sequences)
        registers = _REGISTERS_TURNING if config.turning_warps else _REGISTERS
        self.regs_load, self.regs_mma = registers[config.consumers, config.per_sm]

    @cute.jit
    def __call__(self, ins: Any, outs: Outputs, scalars: Scalars, workspace: SplitWorkspace, stream: Any):
        layouts, mmas = self.of.layouts(), self.mainloop.mmas()
        self.kernel(self.of.loads(ins, layouts), ins, outs, scalars, workspace, layouts, *mmas).launch(
            grid=[workspace.ctas, 1, 1], stream=stream, **launch_shape(self.c)
        )

    @cute.kernel
    def kernel(
        self, loads: Any, ins: Any, outs: Outputs, scalars: Scalars, workspace: SplitWorkspace, layouts: Layouts,
        qk_mma: cute.TiledMma, pv_mma: cute.TiledMma,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        smem = self.of.shared_memory(memory, warp, layouts)
        loaders, turning = const_expr(self.c.loader_warps), const_expr(self.c.turning_warps)
        ring = rings(memory, warp, (("parts", _PARTS, 1, 4 * self.c.consumers + turning),))["parts"]
        parts = Parts(ring, memory.allocate_tensor(Int32, cute.make_layout((NOTE, _PARTS)), 16))
        sCame = memory.allocate_tensor(Int32, cute.make_layout(2), 8)
        places = (t.iterator.toint() for t in (workspace.splits, workspace.count))
        splits = multi_splits.Splits(self.c, self.await_consumers, *places, sCame)
        if warp == 0:
            self.of.prefetch(loads)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp < loaders:
                self.produce(loads, ins, scalars, workspace.start, smem, parts, warp)
            elif const_expr(turning):
                if warp < loaders + turning:
                    self.turn(ins, scalars, smem, parts)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.consume(ins, outs, scalars, splits, smem, parts, qk_mma, pv_mma)

    @cute.jit
    def produce(
        self, loads: Any, ins: Any, scalars: Scalars, start: Int32, smem: SharedMemory, parts: Parts, warp: Int32
    ):  # fmt: skip
        """Every warp that loads goes through this CTA's run; the first tells the consumers."""
        run = self.scheduler.find(ins, scalars, start)
        at, sequence, before, fills, n = run.at, run.sequence, run.before, Int32(0), Int32(0)
        while at < run.stop:
            part, at, before = self.scheduler.part(ins, scalars, run, at, sequence, before)
            sequence = part.sequence
            if part.ctas > 0:
                if warp == 0:
                    parts.tell(n, part.note())
                self.of.produce(loads, ins, part.tile, part.sequence, smem, fills)
                fills += part.tile.stop - part.tile.first
                n += 1
        if warp == 0:
            parts.tell(n, [Int32(-1)])

    @cute.jit
    def turn(self, ins: Any, scalars: Scalars, smem: SharedMemory, parts: Parts):
        """Every warp that turns around what was loaded: one part after another."""
        fills, n = Int32(0), Int32(0)
        while parts.wait(n) >= 0:
            part = self._read(ins, parts, n)
            cute.arch.sync_warp()
            parts.ring.release(n)
            self.of.turn(scalars, part.tile, smem, fills)
            fills += part.tile.stop - part.tile.first
            n += 1

    @cute.jit
    def consume(
        self, ins: Any, outs: Outputs, scalars: Scalars, splits: multi_splits.Splits, smem: SharedMemory, parts: Parts,
        qk_mma: cute.TiledMma, pv_mma: cute.TiledMma,
    ):  # fmt: skip
        c, block = self.c, cute.arch.block_idx()[0]
        w = self.of.multi.consumer(scalars, smem, qk_mma, pv_mma)
        self.mainloop.begin_turns(w)
        fills, n = Int32(0), Int32(0)
        while parts.wait(n) >= 0:
            part = self._read(ins, parts, n)
            rows, _ = self.of.rows(ins, outs, part.tile, part.sequence)
            here, sums = self.of.attend(w, rows, scalars, part.tile, smem, fills)
            part = self._read(ins, parts, n)  # again: registers are scarce between
            rows, results = self.of.rows(ins, outs, part.tile, part.sequence)
            if part.ctas == 1:
                multi_combine.store(c, here, rows, results, part.tile, sums)
            else:
                # Of a CTA's two slots the first is its first part's; of those behind it only the last can be a split.
                slots = multi_splits.Slots(
                    part.first * 2 + part.early, part.first * 2 + 2, part.ctas, block - part.first
                )
                if splits.is_last(here, part.tile, slots, part.first, sums):
                    maxima, sums = splits.add(here, part.tile, slots, sums)
                    multi_combine.store(c, here, rows, results, part.tile, sums, maxima)
            fills += part.tile.stop - part.tile.first
            cute.arch.sync_warp()  # all lanes have read the part, for which one of them arrives
            parts.ring.release(n)
            n += 1

    def _read(self, ins: Any, parts: Parts, n: Int32) -> Part:
        return Part.of(parts.read(n), self.scheduler.sequences.group(ins))
