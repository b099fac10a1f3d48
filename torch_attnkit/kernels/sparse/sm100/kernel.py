"""Sparse attention on Blackwell: each token has its own keys (window rows and listed entries); K is V, shared by all
heads. Swapped operands: S' = K Q' has 128 keys as M and 16 to 64 heads as N, so that few heads cost little.

    producer     4 warps: K/V rows by cp.async, or boxes of TMA where keys are contiguous (load_tile.py); two sides with
                 uniform row strides: TMA gather4 and multicast (load_gather4.py); encoded rows: dequant_kv.py
    MMA          1 warp: tcgen05, S' = K Q' and O' += V' P', both in tensor memory (mma_warp.py)
    softmax      2 warpgroups: S' -> P' in shared memory; rescale O' when a maximum has grown (softmax_warps.py)
    epilogue     the same warps: store, or reduce over the CTAs that share a token's keys (epilogue.py, epilogue_fp4.py)

A cluster has a work tile: up to two sides (64 heads each, the same keys) times up to 8 shares of the keys.

    mbarrier            arrivals per phase
    query               8 softmax warps
    ring full, empty    4 producer warps, and bytes of TMA or of the other side; tcgen05.commit of each side
    scores (2 stages)   tcgen05.commit
    probabilities       8 softmax warps: P' is stored, O' is rescaled
    output              tcgen05.commit

Constraints: D 128, 256 or 512, rows of q aligned to 16 bytes. docs/kernels/sparse.md and docs/lab/sparse.md have more.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm100 import tmem
from torch_attnkit.cuda.sm100.peers import sync_cluster

from ..arguments import Scalars, Tensors, arguments
from ..token_keys import keys_of
from .config import KEYS, LOAD_WARP, MMA_WARP, THREADS, Config
from .cta import CtaCoord, Memory, allocate, cta_coord
from .dequant_kv import DequantProducer
from .epilogue import DenseOutput, Epilogue
from .epilogue_fp4 import Fp4Output
from .load_gather4 import GatherProducer, Matrices, matrices, row_keys_of
from .load_tile import TileProducer
from .mma_warp import MmaWarp
from .softmax_warps import SoftmaxWarps

# setmaxregister of softmax, MMA and producer warps; 128 on average. The FP4 epilogue is larger: most other choices
# spill a word or two at D 512 with split keys.
_REGISTERS, _FP4_REGISTERS = (184, 56, 88), (168, 72, 104)


class Sparse:
    """``config`` selects the producer and the epilogue."""

    def __init__(self, config: Config):
        self.c, self.registers = config, _REGISTERS if config.fp4 is None else _FP4_REGISTERS
        loads = GatherProducer if config.gather4 else TileProducer if config.row.plain else DequantProducer
        self.producer = loads(config)
        self.mma = MmaWarp(config)
        self.softmax = SoftmaxWarps(config)
        output = DenseOutput(config) if config.fp4 is None else Fp4Output(config)
        self.epilogue = Epilogue(config, self.softmax, output)

    @cute.jit
    def __call__(self, tensors: Tensors, numbers: Scalars, stream: Any):
        ctas = numbers.ctas * self.c.sides
        rows = matrices(self.c, tensors) if const_expr(self.c.tma_rows) else None
        self.kernel(tensors, numbers, rows).launch(
            grid=[numbers.concurrent * numbers.groups * ctas, 1, 1], block=[THREADS, 1, 1], cluster=[ctas, 1, 1],
            stream=stream, min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: Tensors, scalars: Scalars, rows: Matrices | None):
        c = self.c
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m = allocate(c, warp)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        cute.arch.cluster_arrive()
        cta = cta_coord(c, tensors, scalars)
        softmax, products, loads = const_expr(self.registers)
        if warp >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(loads)
            self.producer.run(tensors, scalars, rows, cta, m)
            self._leave(m)
        elif warp >= MMA_WARP:
            cute.arch.setmaxregister_decrease(products)
            tiles = tiles_of(c, tensors, scalars, rows, cta)
            cute.arch.cluster_wait()
            tmem.after_sync()
            if warp == MMA_WARP:
                self.mma.run(cta, m, tiles)
            self._leave(m)
        else:
            cute.arch.setmaxregister_increase(softmax)
            self._attend(tensors, scalars, rows, cta, m)
        tmem.after_sync()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem.pointer(Float32, 0), tmem.COLUMNS)

    @cute.jit
    def _attend(self, tensors: Tensors, scalars: Scalars, rows: Matrices | None, cta: CtaCoord, m: Memory):
        """Softmax warps: Q, mainloop, epilogue."""
        self.softmax.load_query(tensors, cta, m)
        tiles = tiles_of(self.c, tensors, scalars, rows, cta)
        cute.arch.cluster_wait()
        tmem.after_sync()
        self.softmax.release_query(m)
        self.softmax.run(scalars, m, tiles)
        if const_expr(self.c.split_kv):
            self.epilogue.leave(m, tiles)
            tmem.before_sync()
            sync_cluster()
            self.epilogue.merge(tensors, scalars, cta, m)
        else:
            self.epilogue.store(tensors, scalars, cta, m)
            tmem.before_sync()
        sync_cluster()  # DSMEM: no CTA exits while a peer reads it

    @cute.jit
    def _leave(self, m: Memory):
        """Warps without an epilogue join the cluster barriers of the others."""
        if const_expr(self.c.split_kv):
            sync_cluster()
        sync_cluster()


def tiles_of(config: Config, tensors: Tensors, scalars: Scalars, matrices: Matrices | None, cta: CtaCoord) -> Int32:
    """K/V tiles of the CTA's share of the keys."""
    if const_expr(config.gather4):
        keys = row_keys_of(config, tensors, scalars, matrices, cta.token, cta.part).keys
    else:
        keys = keys_of(config, tensors, scalars, cta.token, cta.part)
    return cute.arch.make_warp_uniform((keys.stop - keys.first + (KEYS - 1)) // KEYS)


def trace(arch: str, *, dtype: str, dim: int, **sizes: Any) -> tuple[Any, list[Any]]:
    """Requires rows of q aligned to 16 bytes, as rows of 16-bit caches are."""
    config = Config(fake.dtype(dtype), dim, **sizes)
    angles = None if config.fp4 is None else config.fp4[2]
    return Sparse(config), arguments(dtype, dim, config.row, config.align, angles)
