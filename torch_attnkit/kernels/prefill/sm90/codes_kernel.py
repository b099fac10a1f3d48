"""What to compile for E4M3 on Hopper: the kernel of ``prefill.py`` with other consumers, and V's transposition before
it."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.ring import Fixed

from .. import arguments
from ..types import Inputs
from .codes import Config, Mainloop
from .prefill import Prefill
from .transposed import Config as TransposeConfig
from .transposed import Transpose


class Values(Fixed):
    """In the place of ``prefill.Values``: V transposed."""

    def __init__(self, config: Config, mainloop: Mainloop):
        c = self.c = config
        self.tile, self.whole = (c.dim_v, c.tile_n), (0, None)
        self.layout = lambda: mainloop.layout((c.dim_v, c.tile_n, c.stages))

    def view(self, v: cute.Tensor) -> cute.Tensor:
        """(Dv, S', Hkv, B); packed: (Dv, S', Hkv)"""
        return cute.make_tensor(v.iterator, cute.select(v.layout, mode=[1, 2, 0] if self.c.varlen else [2, 3, 1, 0]))

    def of_sequence(self, v_head: cute.Tensor, k0: Int32, number: Int32) -> cute.Tensor:
        return cute.domain_offset((0, (k0 // self.c.tile_n + number) * self.c.tile_n), v_head)


def _kernel(config: Config) -> Prefill:
    kernel = Prefill(config)
    kernel.mainloop = Mainloop(config)
    kernel.values = Values(config, kernel.mainloop)
    return kernel


def _transposed(config: Any) -> Any:
    """V that was transposed, (B, Hkv, Dv, S'), packed without the first axis."""
    axes = [fake.dim32() for _ in range(1 if config.varlen else 2)]
    return arguments._rows("u8", *axes, config.dim_v, fake.dim(16))


def trace_dense(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For batches of sequences."""
    config = Config(dtype=fake.dtype(dtype), **signature)
    ins, *others = arguments.dense(dtype, config)
    return _kernel(config), [ins._replace(v=_transposed(config)), *others]


def trace_packed(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For sequences one after another."""
    config = Config(dtype=fake.dtype(dtype), varlen=True, **signature)
    ins, *others = arguments.packed(dtype, config)
    return _kernel(config), [ins._replace(v=_transposed(config)), *others]


def trace_transpose(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """V of either, before the kernel."""
    config = TransposeConfig(dtype=fake.dtype(dtype), **signature)
    made = arguments.packed if config.varlen else arguments.dense
    ins, _, scalars, stream = made(dtype, config)
    return Transpose(config), [Inputs(*ins), _transposed(config), scalars, stream]
