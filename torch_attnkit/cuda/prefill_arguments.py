"""Stand-ins for the arguments of a prefill kernel, for compiling it. Imports cutlass.

Strides of q, k, v and out are multiples of 16 bytes, as TMA and the stores need. E4M3 comes as bytes, since not every
torch hands it over.
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


def _rows(name: str, *shape: Any) -> Any:
    """A tensor whose rows start at multiples of 16 bytes."""
    step = 16 if name == "u8" else 8
    return fake.tensor(name, shape, (*(fake.dim(step) for _ in shape[1:]), 1))


def _scales(config: Features, sequences: Any, kv_heads: Any) -> Any:
    made = (fake.tensor("f32", (sequences, kv_heads), align=4) if on else None for on in config.scales)
    return tuple(made) or None


def dense(name: str, config: Features) -> list[Any]:
    """For batches of sequences, in a dtype in the table's words."""
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))
    stored, result = ("u8", "bf16") if name == "f8e4m3" else (name, name)

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (B, T, Hq), align=4) if on else None

    ins = Inputs(
        _rows(stored, B, T, Hq, config.dim),
        _rows(stored, B, S, Hkv, config.dim),
        _rows(stored, B, S, Hkv, config.dim_v),
        _vector("f32", Hq, config.sink),
        _vector("i32", B, config.kv_start),
        _vector("i32", B, config.kv_len),
        _scales(config, B, Hkv),
    )
    outs = Outputs(_rows(result, B, T, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    return [ins, outs, _scalars(), fake.stream()]


def packed(name: str, config: Features) -> list[Any]:
    """For sequences one after another, with offsets."""
    Tq, Tk, Hq, Hkv, ends, sequences = (fake.dim32() for _ in range(6))
    stored, result = ("u8", "bf16") if name == "f8e4m3" else (name, name)

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (Tq, Hq), align=4) if on else None

    ins = Inputs(
        _rows(stored, Tq, Hq, config.dim),
        _rows(stored, Tk, Hkv, config.dim),
        _rows(stored, Tk, Hkv, config.dim_v),
        _vector("f32", Hq, config.sink),
        _vector("i32", ends),
        _vector("i32", ends),
        _scales(config, sequences, Hkv),
    )
    outs = Outputs(_rows(result, Tq, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    return [ins, outs, _scalars(), fake.stream()]
