"""Stand-ins for the arguments of a prefill kernel, for compiling it.

Strides of q, k, v and out are multiples of 16 bytes, as TMA and the stores need. E4M3 comes as bytes, since not every
torch hands it over.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

from .types import Features, Inputs, Outputs, Scalars


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


def _arguments(name: str, config: Features, queries: tuple, keys: tuple, ends: tuple, sequences: Any) -> list[Any]:
    """With axes of tokens for the queries and the keys, and the fields ``low`` and ``high`` of Inputs."""
    Hq, Hkv = (fake.dim32() for _ in range(2))
    stored, result = ("u8", "bf16") if name == "f8e4m3" else (name, name)

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (*queries, Hq), align=4) if on else None

    ins = Inputs(
        _rows(stored, *queries, Hq, config.dim),
        _rows(stored, *keys, Hkv, config.dim),
        _rows(stored, *keys, Hkv, config.dim_v),
        _vector("f32", Hq, config.sink),
        *ends,
        _scales(config, sequences, Hkv),
    )
    outs = Outputs(_rows(result, *queries, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    return [ins, outs, _scalars(), fake.stream()]


def dense(name: str, config: Features) -> list[Any]:
    """For batches of sequences, in a dtype in the table's words."""
    B, T, S = (fake.dim32() for _ in range(3))
    ends = (_vector("i32", B, config.kv_start), _vector("i32", B, config.kv_len))
    return _arguments(name, config, (B, T), (B, S), ends, B)


def packed(name: str, config: Features) -> list[Any]:
    """For sequences one after another, with offsets."""
    Tq, Tk, count, sequences = (fake.dim32() for _ in range(4))
    return _arguments(name, config, (Tq,), (Tk,), (_vector("i32", count), _vector("i32", count)), sequences)
