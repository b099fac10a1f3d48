"""Routed experts with FP4 weights on Hopper: a sort and two products.

    1 warp         weights of a stage by TMA
    4 warps        tokens and scales of a stage (gather.py)
    8 warps        decode, multiply (mainloop.py), and what becomes of the sums (epilogue.py)
    2 warps        in the second product: add up tokens' results

All meet in one ring of stages; a block takes work tiles until none is left. The second product's weights are on their
way while blocks of the first still run (programmatic dependent launch).
docs/kernels/grouped_gemm.md has what limits it. Imports cutlass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Ring, rings

from .arguments import Flags, Matrices, Scalars, Tensors
from .config import COMBINERS, CONSUMERS, GATHERERS, LOADER, WARPS, Config
from .epilogue import Activation, Combine
from .gather import Gather
from .mainloop import Mainloop
from .routing import Sort
from .schedule import Work, work
from .shared import ROW_BYTES, Loads, Shared, box_rows, loads


class Registers(NamedTuple):
    """Of a thread, by role; 128 is the mean."""

    consumers: int
    gatherers: int
    others: int


_REGISTERS = Registers(128, 200, 56)


class Product:
    """One product: its kernel, by roles."""

    def __init__(self, config: Config, epilogue: Any, rounded: Any):
        self.c, self.epilogue = config, epilogue
        self.gather, self.mainloop = Gather(config, rounded), Mainloop(config)

    def of(self, tensors: Tensors, scalars: Scalars) -> tuple[Flags, Matrices, cute.Tensor]:
        """What of the arguments this product is about: flags, weights, and the rows that they are multiplied with."""
        if self.c.paired:
            return scalars.up, tensors.up, tensors.x
        return scalars.down, tensors.down, tensors.h

    @cute.jit
    def launch(self, tensors: Tensors, scalars: Scalars, blocks: Int32, stream: Any):
        flags, weights, _ = self.of(tensors, scalars)
        self.kernel(tensors, scalars, loads(self.c, flags, weights)).launch(
            grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, min_blocks_per_mp=1,
            preferred_smem_carveout=100, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, scalars: Scalars, loads: Loads):
        c = self.c
        flags, weights, source = self.of(tensors, scalars)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        made = rings(memory, warp, (("stages", c.stages, 2, CONSUMERS), ("results", 2, CONSUMERS, COMBINERS)))
        ring, results = made["stages"], made["results"]
        shared = Shared(c, memory)
        if warp == LOADER:
            cpasync.prefetch_descriptor(loads.atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if const_expr(c.paired):
            # Only now may the next launch begin: what it then reads without waiting, the sort's work tiles, is there.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        share = work(tensors, (Int32(weights.codes.shape[1]) + c.rows - 1) // c.rows)
        if const_expr(not c.paired):
            if warp != LOADER:  # weights may come before h is there
                cute.arch.griddepcontrol_wait()
        if warp < CONSUMERS:
            cute.arch.setmaxregister_increase(_REGISTERS.consumers)
            self._consume(tensors, scalars, source, share, ring, results, shared, warp)
        elif warp < CONSUMERS + GATHERERS:
            cute.arch.setmaxregister_increase(_REGISTERS.gatherers)
            self.gather.run(tensors, flags, weights, source, share, ring, shared, warp - CONSUMERS)
        else:
            cute.arch.setmaxregister_decrease(_REGISTERS.others)
            if warp == LOADER:
                self._load(tensors, loads, source, share, ring, shared)
            elif const_expr(not c.paired):
                if warp <= LOADER + COMBINERS:
                    self.epilogue.combine(tensors, share, results, warp - LOADER - 1)

    @cute.jit
    def _load(self, tensors: Tensors, loads: Loads, source: cute.Tensor, share: Work, ring: Ring, shared: Shared):
        c = self.c
        steps = (Int32(source.shape[1]) + c.stage - 1) // c.stage
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, turn)
            share.prefetch(tensors, turn + 1)  # for all roles: this one is the first to need it
            gW = cute.local_tile(loads.rows[None, None, tile.expert], (box_rows(c), ROW_BYTES), (None, None))
            tWs, tWg = copies.tma_partition(loads.atom, 0, 1, shared.sW, gW)
            for k in cutlass.range(steps, unroll=1):
                full = ring.acquire(n, c.weight_bytes)
                for box in cutlass.range_constexpr(c.slices):
                    from_, to = tWg[None, tile.row, k * c.slices + box], tWs[None, ring.slot(n) * c.slices + box]
                    cute.copy(loads.atom, from_, to, tma_bar_ptr=full)
                n += 1

    @cute.jit
    def _consume(
        self, tensors: Tensors, scalars: Scalars, source: cute.Tensor, share: Work, ring: Ring, results: Ring,
        shared: Shared, warp: Int32,
    ):  # fmt: skip
        steps = (Int32(source.shape[1]) + self.c.stage - 1) // self.c.stage
        self.epilogue.begin(tensors, warp)
        rSum = self.mainloop.sums()
        n = Int32(0)
        for turn in cutlass.range(share.count, unroll=1):
            tile = share.tile(tensors, turn)
            self.mainloop.run(rSum, tile.columns, steps, n, ring, shared, warp)
            self.mainloop.join_slices(rSum, shared, warp)
            self.epilogue.run(tensors, scalars, rSum, tile, results, turn, warp)
            n += steps


class Experts:
    """The launches of a call."""

    def __init__(self, up: Config, down: Config, experts: int, rounded: Any):
        self.sort = Sort(up.columns, experts)
        self.up = Product(up, Activation(up), rounded)
        self.down = Product(down, Combine(down), rounded)

    @cute.jit
    def __call__(self, tensors: Tensors, scalars: Scalars, up_blocks: Int32, down_blocks: Int32, stream: Any):
        self.sort.launch(tensors, stream)
        self.up.launch(tensors, scalars, up_blocks, stream)
        self.down.launch(tensors, scalars, down_blocks, stream)
