"""Stand-ins for the arguments of a prefill kernel, for compiling it. Imports cutlass.

Strides of q, k, v and out are multiples of 16 bytes, as TMA and the stores need.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32

from . import fake
from .prefill_types import Features, Inputs, Outputs, Scalars


def _vector(kind: str, size: Any, on: bool = True) -> Any:
    return fake.tensor(kind, (size,), (None,), align=4) if on else None


def _scalars() -> Scalars:
    return Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(4)))


def dense(name: str, config: Features) -> list[Any]:
    """For batches of sequences, in a dtype in the table's words."""
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))

    def rows(*shape: Any) -> Any:
        return fake.tensor(name, shape, (*(fake.dim(8) for _ in shape[1:]), 1))

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (B, T, Hq), align=4) if on else None

    ins = Inputs(
        rows(B, T, Hq, config.dim),
        rows(B, S, Hkv, config.dim),
        rows(B, S, Hkv, config.dim_v),
        _vector("f32", Hq, config.sink),
        _vector("i32", B, config.kv_start),
        _vector("i32", B, config.kv_len),
    )
    outs = Outputs(rows(B, T, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    return [ins, outs, _scalars(), fake.stream()]


def packed(name: str, config: Features) -> list[Any]:
    """For sequences one after another, with offsets."""
    Tq, Tk, Hq, Hkv, ends = (fake.dim32() for _ in range(5))

    def rows(*shape: Any) -> Any:
        return fake.tensor(name, shape, (fake.dim(8), fake.dim(8), 1))

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (Tq, Hq), align=4) if on else None

    ins = Inputs(
        rows(Tq, Hq, config.dim),
        rows(Tk, Hkv, config.dim),
        rows(Tk, Hkv, config.dim_v),
        _vector("f32", Hq, config.sink),
        _vector("i32", ends),
        _vector("i32", ends),
    )
    outs = Outputs(rows(Tq, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    return [ins, outs, _scalars(), fake.stream()]
