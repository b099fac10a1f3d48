"""Attention of tokens that each have keys of their own on Blackwell; keys are values, too, and shared by all heads.

    producer      4 warps: keys of a tile row by row, by cp.async, half of them for the other side (loads.py); where all
                  rows of a cache have one distance by TMA: for both sides at once (gathered.py), of one side tiles
                  whose keys follow one another (boxed.py)
    products      1 warp: S' = K Q', O' += V' P', tcgen05, both in tensor memory (products.py)
    softmax       2 warpgroups: S' -> P' in shared memory; O' *= factor when a maximum moved far (softmax_warps.py)
    results       the same: the result, or what the CTAs that share a token's keys join (results.py)

Keys are the 128 rows of a product and query heads its columns, so 16 heads cost no more than they are, and up to 64
leave room in tensor memory for 512 columns of output. A cluster has a work tile: its CTAs are up to two sides, of 64
heads each, and up to 8 shares of the keys. docs/lab/sparse.md has what limits it.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.sm100.peers import sync_cluster as meet_cluster

from ..sm90.arguments import Numbers, Tensors, arguments
from .coded import CodedProducer
from .config import LOAD_WARP, PRODUCT_WARP, THREADS, Config
from .gathered import GatheredProducer
from .loads import Producer
from .memory import Memory, allocate
from .place import Place, place_of, tiles_of
from .products import ProductWarp
from .results import Results
from .row_numbers import Matrices, matrices
from .softmax_warps import SoftmaxWarps

# Of a thread of the softmax, the products and the producer; 128 is the mean. The epilogue for codes is larger: with the
# first split, and with most others, ptxas spills a word or two of kernels that merge at D 512.
_REGISTERS, _FP4_REGISTERS = (184, 56, 88), (168, 72, 104)


class Sparse:
    """The kernel: a work tile for a cluster, by three roles of warps."""

    def __init__(self, config: Config):
        self.c, self.registers = config, _REGISTERS if config.fp4 is None else _FP4_REGISTERS
        loads = GatheredProducer if config.grouped else Producer if config.row.plain else CodedProducer
        self.producer = loads(config)
        self.products = ProductWarp(config)
        self.softmax = SoftmaxWarps(config)
        self.results = Results(config, self.softmax)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Numbers, stream: Any):
        ctas = numbers.ctas * self.c.sides
        rows = matrices(self.c, tensors) if const_expr(self.c.numbered) else None
        self.kernel(tensors, numbers, rows).launch(
            grid=[numbers.together * numbers.groups * ctas, 1, 1], block=[THREADS, 1, 1], cluster=[ctas, 1, 1],
            stream=stream, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, numbers: Numbers, rows: Matrices | None):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m = allocate(c, warp)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        cute.arch.cluster_arrive()
        place = place_of(c, tensors, numbers)
        softmax, products, loads = const_expr(self.registers)
        if warp >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(loads)
            self.producer.run(tensors, numbers, rows, place, m)
            self._leave(m)
        elif warp >= PRODUCT_WARP:
            cute.arch.setmaxregister_decrease(products)
            tiles = tiles_of(c, tensors, numbers, rows, place)
            cute.arch.cluster_wait()
            tmem.after_sync()
            if warp == PRODUCT_WARP:
                self.products.run(place, m, tiles)
            self._leave(m)
        else:
            cute.arch.setmaxregister_increase(softmax)
            self._attend(tensors, numbers, rows, place, m)
        tmem.after_sync()
        if warp == PRODUCT_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)

    @cute.jit
    def _attend(self, tensors: Tensors, numbers: Numbers, rows: Matrices | None, place: Place, m: Memory):
        """Softmax and results."""
        self.softmax.load_query(tensors, place, m)
        tiles = tiles_of(self.c, tensors, numbers, rows, place)
        cute.arch.cluster_wait()
        tmem.after_sync()
        self.softmax.give_query(m)
        self.softmax.run(numbers, m, tiles)
        if const_expr(self.c.merge):
            self.results.leave(m, tiles)
            tmem.before_sync()
            meet_cluster()
            self.results.merge(tensors, numbers, place, m)
        else:
            self.results.store(tensors, numbers, place, m)
            tmem.before_sync()
        meet_cluster()  # no CTA may leave while another reads its memory

    @cute.jit
    def _leave(self, m: Memory):
        """Warps that have no results meet the others as often."""
        if const_expr(self.c.merge):
            meet_cluster()
        meet_cluster()


def trace(arch: str, *, dtype: str, dim: int, **sizes: Any) -> tuple[Any, list[Any]]:
    """For rows of q that start at multiples of 16 bytes, as those of the caches do that hold numbers."""
    config = Config(fake.dtype(dtype), dim, **sizes)
    angles = None if config.fp4 is None else config.fp4[2]
    return Sparse(config), arguments(dtype, dim, config.row, config.align, angles)
