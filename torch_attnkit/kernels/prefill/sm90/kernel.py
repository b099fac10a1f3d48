"""The Hopper prefill kernel: softmax attention of many queries per sequence by TMA loads, ``wgmma`` and warp roles.

    producer warpgroup  --K, V and Q, a ring each-->  shared memory  -->  1 to 3 consumer warpgroups, 64 rows each

How a CTA begins and ends is here. Its parts:

    work tiles, warp roles      tile_scheduler.py, split_kv_scheduler.py
    rows and keys of a tile     seqlen.py
    producer                    load_tma.py, load_paged.py; transpose_v.py of E4M3, widen.py of E4M3 beside 16 bits
    consumers                   mainloop.py, mainloop_fp8.py, mainloop_hdim512.py; mask.py
    results                     epilogue.py, combine.py

A full barrier takes 1 arrival, of the producer's elected lane, and the bytes of TMA; threads that copy rows arrive
each, and so do warps that transpose V or widen K and V. An empty barrier takes 4 for each consumer, of both CTAs of a
pair. Consumers keep scores, probabilities and output in registers; with ``ping_pong`` one's softmax runs under
another's products.
Blocks of keys that no row of a tile sees are never loaded; only blocks at an edge of what is seen are masked. Two CTAs
may form a ``pair``: each loads half of every block by TMA multicast, for both. The design is FlashAttention-3's.

Tile letters: M rows, N keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from torch_attnkit.cuda import fake

from .config import Config, arguments
from .epilogue import Epilogue
from .load_tma import TmaLoader
from .mainloop import Mainloop
from .seqlen import SEQUENCES
from .tile_scheduler import Arguments, Collective, DynamicPersistent, Scheduler, StaticPersistent, sync_cluster
from .tiles import DYNAMIC, STATIC, STREAM_K


@dataclass(frozen=True)
class Parts:
    """What a Config may ask for, beside the dense kernel of 16 bits."""

    mainloop: type[Mainloop] = Mainloop
    epilogue: type[Epilogue] = Epilogue
    loader: type[TmaLoader] = TmaLoader
    split_kv: Any = None  # the module of schedulers that split keys
    of_fp8: tuple[type[Mainloop] | None, Any] = (None, None)  # the mainloop, and what transposes V in the producer
    widen: Any = None  # what widens K and V of E4M3 there


def trace(parts: Parts, *, dtype: str, kv: str = "dense", **signature: Any) -> tuple[Any, list[Any]]:
    """The kernel for a Config, and stand-ins for its arguments."""
    c = Config(dtype=fake.dtype(dtype), kv=kv, varlen=kv == "packed", **signature)
    mainloop_fp8, transpose_v = parts.of_fp8
    mainloop = (mainloop_fp8 or parts.mainloop)(c) if c.fp8 else parts.mainloop(c)
    if c.scheduler == STATIC:
        return Attention(c, StaticPersistent(c, mainloop, parts.epilogue(c, mainloop))), arguments(dtype, c)
    converter = transpose_v(c, mainloop) if c.fp8 else parts.widen(c, mainloop) if c.fp8_kv else None
    sequences = SEQUENCES[kv](c)
    collective = Collective(c, mainloop, sequences, parts.loader(c, mainloop, sequences, converter))
    if c.scheduler == DYNAMIC:
        kernel = AttentionWithCounter(c, DynamicPersistent(c, collective))
    elif c.scheduler == STREAM_K:
        kernel = AttentionWithWorkspace(c, parts.split_kv.StreamK(c, collective))
    else:
        kernel = Attention(c, parts.split_kv.SingleTile(c, collective))
    return kernel, arguments(dtype, c)


class Attention:
    """The kernel: a scheduler says what a CTA's producer warpgroup and its consumer warpgroups do."""

    def __init__(self, config: Config, scheduler: Scheduler):
        self.c, self.scheduler = config, scheduler
        self.regs_load, self.regs_mma = scheduler.registers

    @cute.jit
    def __call__(self, ins: Any, outs: Any, scalars: Any, stream: Any):
        self._launch(ins, outs, scalars, None, stream)

    def _launch(self, ins: Any, outs: Any, scalars: Any, workspace: Any, stream: Any) -> None:
        s = self.scheduler
        layouts = s.layouts()
        loads, work, mmas, ctas = s.launch(ins, scalars, workspace, layouts)
        self.kernel(loads, ins, outs, scalars, work, layouts, *mmas).launch(
            grid=[ctas, 1, 1], stream=stream, **s.launch_shape(scalars)
        )

    @cute.kernel
    def kernel(
        self, loads: Any, ins: Any, outs: Any, scalars: Any, work: Any, layouts: Any, qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
    ):  # fmt: skip
        args, warp = Arguments(ins, outs, scalars, work), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self.scheduler.shared_memory(cutlass.memory.SmemAllocator(), warp, layouts, work)
        if warp == 0:
            self.scheduler.prefetch(loads)
        first, valid = self.scheduler.first(ins, scalars)
        cute.arch.mbarrier_init_fence()
        if const_expr(self.c.pair):
            sync_cluster()  # neither CTA may write to the other before its barriers stand
        else:
            cute.arch.sync_threads()
        if valid:
            if warp < 4:
                cute.arch.setmaxregister_decrease(self.regs_load)
                self.scheduler.produce(args, loads, smem, warp, first)
            else:
                cute.arch.setmaxregister_increase(self.regs_mma)
                self.scheduler.consume(args, smem, (qk_mma, pv_mma), first)
        self.scheduler.finish()


class AttentionWithWorkspace(Attention):
    """The same with a ``SplitWorkspace``, stream-K's."""

    @cute.jit
    def __call__(self, ins: Any, outs: Any, scalars: Any, workspace: Any, stream: Any):
        self._launch(ins, outs, scalars, workspace, stream)


class AttentionWithCounter(Attention):
    """The same with a ``TileCounter``, the dynamic scheduler's. The name of an argument stands in the messages of the
    compiled host function, and so in what evidence was recorded for."""

    @cute.jit
    def __call__(self, ins: Any, outs: Any, scalars: Any, draws: Any, stream: Any):
        self._launch(ins, outs, scalars, draws, stream)
