"""What to compile for dense and packed batches whose work tiles persistent CTAs draw."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

from .. import arguments
from ..types import Features
from .dynamic import Batch, Dynamic
from .dynamic_types import TensorConfig, draws
from .multi_types import Scalars
from .tensor_dynamic import DenseBatch, PackedBatch


def _features(c: TensorConfig) -> Features:
    """Those that decide on arguments; there is always room for sinks."""
    sizes = {"dtype": c.dtype, "dim": c.dim, "dim_v": c.dim_v, "tile_n": c.tile_n}
    return Features(**sizes, sink=True, kv_len=c.kv_len, kv_start=c.kv_start)


def _traced(config: TensorConfig, batch: Batch, given: list[Any]) -> tuple[Any, list[Any]]:
    ins, outs, _, stream = given
    scalars = Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6)))
    return Dynamic(config, batch), [ins, outs, scalars, draws(), stream]


def trace_dense_dynamic(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For batches of sequences."""
    config = TensorConfig(fake.dtype(dtype), **signature)
    return _traced(config, DenseBatch(config), arguments.dense(dtype, _features(config)))


def trace_packed_dynamic(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For sequences one after another."""
    config = TensorConfig(fake.dtype(dtype), packed=True, **signature)
    return _traced(config, PackedBatch(config), arguments.packed(dtype, _features(config)))
