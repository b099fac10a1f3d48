"""Sparse attention on Hopper: each token has its own keys (window rows and listed entries); K is V, shared by all
heads.

Warp specialised, 384 threads; a work tile is a token with up to 64 of its heads (padded), M of every ``wgmma``.

    producer warpgroup     Q and K/V rows by cp.async (load_kv.py), or dequantised into the ring (dequant_kv.py)
    2 consumer warpgroups  alternate tiles: S = Q K', online softmax, P; each owns half of O's columns (mainloop.py), or
                           all keys of the CTA in a single pass (mainloop_single_pass.py)

Grid: persistent, one CTA a work tile, the next tile's keys in flight during the epilogue; or ``split_kv``: clusters of
up to 8 CTAs, ``groups`` of them a work tile, reduce over DSMEM and a workspace (split_combine.py).

    mbarrier         arrivals per phase
    query full       each thread that copies Q (cp.async), and the producer for the tile count; 128 in a single pass
    query empty      8 consumer warps
    tiles full       a half tile: 33 per producer warp (cp.async arrivals of 32 lanes, and the mask); dequantised: 1
    tiles empty      8 consumer warps, of both CTAs where a pair shares dequantised rows
    P full, empty    4 warps of the warpgroup that made P; 4 of the other
    staged           1 and the bytes, for each producer warp and staging tile: bulk copies of encoded rows
    received, read   1 and the bytes of the peers' partials; every consumer warp of the cluster is done with Q

Constraints: D 128, 256 or 512, rows of q aligned to 16 bytes. docs/kernels/sparse.md shows the pipeline; the split of O
over two warpgroups is FlashMLA's.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm90.warpgroup import THREADS, WARPS

from ..arguments import Scalars, Tensors, arguments
from ..token_keys import work_tile, work_tiles
from .barriers import Barriers, sync_cluster
from .config import HALVES, Config
from .dequant_kv import BulkDequantTiles, DequantTiles
from .epilogue import DenseOutput, Epilogue
from .epilogue_fp4 import Fp4Output
from .load_kv import DenseTiles, Producer, load_query, prefetch_first_tile
from .mainloop import Mainloop, Start
from .mainloop_single_pass import SinglePassMainloop
from .plan import SIDES
from .split_combine import SplitBuffers, SplitCombine

# setmaxregister of producer and consumers; 168 on average. Dequantising needs more.
_REGISTERS, _DEQUANT_REGISTERS = (56, 224), (72, 216)


class Sparse:
    """``config`` selects K/V loader, mainloop, epilogue and whether keys are split over CTAs."""

    def __init__(self, config: Config):
        self.c = config
        tiles = DenseTiles if config.row.plain else BulkDequantTiles if config.bulk else DequantTiles
        self.producer = Producer(config, tiles(config))
        self.mainloops = [
            (SinglePassMainloop if config.single_pass else Mainloop)(config, half) for half in range(HALVES)
        ]
        output = DenseOutput(config.dtype) if config.fp4 is None else Fp4Output(config)
        self.epilogues = [Epilogue(config, half, output) for half in range(HALVES)]
        self.combine = SplitCombine(config, self.epilogues, output)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Scalars, stream: Any):
        c = self.c
        self.kernel(tensors, numbers).launch(
            grid=[numbers.concurrent * numbers.groups * numbers.ctas, 1, 1], block=[c.threads, 1, 1],
            cluster=[numbers.ctas * c.sides, 1, 1],
            smem=c.shared_bytes, stream=stream, min_blocks_per_mp=1, preferred_smem_carveout=100, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, scalars: Scalars):
        c = self.c
        shared = cutlass.memory.SmemAllocator().allocate(c.shared_bytes, 1024).toint()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        barriers = Barriers(c, shared)
        if cute.arch.thread_idx()[0] == 0:
            barriers.init(scalars.ctas)
        cute.arch.mbarrier_init_fence()
        if const_expr(c.sides == SIDES):
            sync_cluster()
        else:
            cute.arch.barrier()
        if const_expr(c.split_kv):
            cute.arch.cluster_arrive_relaxed()  # waited for in ``arrive_query_read``
        first, part = cute.arch.block_idx()[0], Int32(0)  # work tile, and the CTA's index within it
        if const_expr(c.split_kv):
            each = scalars.groups * scalars.ctas
            side, first = first % c.sides, first // c.sides
            first, part = first // each * c.sides + side, first % each
        # Programmatic dependent launch: no global memory is read or written before griddepcontrol_wait.
        cute.arch.griddepcontrol_launch_dependents()
        prefetch_first_tile(c, tensors, scalars, work_tile(tensors, scalars, first), part)
        cute.arch.griddepcontrol_wait()
        few, many = const_expr(_REGISTERS if c.row.plain else _DEQUANT_REGISTERS)
        if warp >= HALVES * WARPS:
            cute.arch.setmaxregister_decrease(few)
            if const_expr(c.single_pass):
                tile = work_tile(tensors, scalars, first)
                load_query(c, tensors, tile, shared, barriers, THREADS)
                if const_expr(not c.row.plain):
                    self.producer.load_single_pass(0, tensors, scalars, tile, part, shared, barriers)
            else:
                self.producer.run(tensors, scalars, shared, barriers, first, part)
            if const_expr(c.split_kv):
                cute.arch.cluster_wait()
                cute.arch.cluster_arrive_relaxed()
                cute.arch.cluster_wait()
            if const_expr(c.sides == SIDES):
                sync_cluster()
        elif warp >= WARPS:
            cute.arch.setmaxregister_increase(many)
            self._consumer(1, tensors, scalars, shared, barriers, first, part)
        else:
            cute.arch.setmaxregister_increase(many)
            self._consumer(0, tensors, scalars, shared, barriers, first, part)

    def _consumer(self, half: int, *arguments: Any) -> None:
        (self._consume_single_pass if self.c.single_pass else self._consume)(half, *arguments)

    @cute.jit
    def _consume_single_pass(
        self, half: cutlass.Constexpr, tensors: Tensors, scalars: Scalars, shared: Int32, barriers: Barriers,
        index: Int32, part: Int32,
    ):  # fmt: skip
        """The CTA's only work tile, all keys of its share resident."""
        w, tile = self.mainloops[half].fragments(shared), work_tile(tensors, scalars, index)
        self.producer.load_single_pass(1 + half, tensors, scalars, tile, part, shared, barriers)
        maxima, sums = self.mainloops[half].run(scalars, shared, barriers, w)
        buffers = SplitBuffers(self.c, scalars, shared)
        self.combine.send_sums(half, tile, barriers, buffers, w, (maxima, sums, [Float32(1.0)] * 2))
        self.combine.run(tensors, scalars, tile, index, part, buffers, shared, barriers)
        cute.arch.cluster_wait()  # peers have received this CTA's partials

    @cute.jit
    def _consume(
        self, half: cutlass.Constexpr, tensors: Tensors, scalars: Scalars, shared: Int32, barriers: Barriers,
        first: Int32, part: Int32,
    ):  # fmt: skip
        w = self.mainloops[half].fragments(shared)
        start, item = Start(Int32(0), Int32(0), Int32(0)), Int32(0)  # tiles and work tiles so far
        for index in cutlass.range(first, work_tiles(tensors, scalars), scalars.concurrent, unroll=1):
            tile = work_tile(tensors, scalars, index)
            if const_expr(self.c.split_kv):  # one work tile per CTA: nothing to overlap
                load_query(self.c, tensors, tile, shared, barriers, THREADS * HALVES)
            barriers.query.wait(item)
            # Warp-uniform, else wgmma descriptors would be computed per lane.
            tiles = cute.arch.make_warp_uniform(barriers.info(shared)[0])
            cute.arch.sync_warp()  # every lane has read it before Q's slot is released
            self.mainloops[half].run(scalars, shared, barriers, w, start, tiles)
            if const_expr(self.c.split_kv):
                buffers = SplitBuffers(self.c, scalars, shared)
                self.combine.send(half, tile, shared, barriers, buffers, w)
                self.combine.run(tensors, scalars, tile, index, part, buffers, shared, barriers)
                cute.arch.cluster_wait()  # peers have received this CTA's partials
            else:
                self.epilogues[half].store(tensors, scalars, tile, shared, w)
            start = start.after(tiles)
            item += 1
        if const_expr(self.c.sides == SIDES):
            sync_cluster()  # the paired CTA may still arrive on this one's mbarriers


def trace(arch: str, *, dtype: str, dim: int, **sizes: Any) -> tuple[Any, list[Any]]:
    """Requires rows of q aligned to 16 bytes, as rows of 16-bit caches are."""
    config = Config(fake.dtype(dtype), dim, **sizes)
    angles = None if config.fp4 is None else config.fp4[2]
    return Sparse(config), arguments(dtype, dim, config.row, config.align, angles)
