"""What the Blackwell kernel for blocks of queries over pages is compiled for and given."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

from .. import arguments as shared
from ..types import Inputs, Outputs, Scalars
from .types import Config


@dataclass(frozen=True)
class Paging:
    """How keys lie in pages and come to shared memory, fixed at compile time."""

    page: int  # keys
    box: int  # keys of a page that TMA loads at once; 0: rows are gathered, four at a time


def box_columns(c: Config) -> int:
    """Of a box: what a row of the swizzled layout has, 128 or 64 bytes."""
    return 64 if c.dim % 64 == 0 and c.dim_v % 64 == 0 else 32


class Ends(NamedTuple):
    """``high`` of Inputs, whose k and v are pages (Np, Ps, Hkv, D) and (Np, Ps, Hkv, Dv)."""

    kv_len: cute.Tensor  # (B)
    table: cute.Tensor  # (B, Mp)
    rows: Any  # where rows are gathered, of k and v (R, D) and (R, Dv): every row that is at a multiple of one distance


class Pages(NamedTuple):
    """What a look-up reads."""

    k: cute.Tensor  # (Np, Ps, Hkv, D)
    table: cute.Tensor  # (B, Mp)


def arguments(dtype: str, config: Config, paging: Paging) -> list[Any]:
    """Stand-ins for what the host passes: ``Inputs``, ``Outputs``, ``Scalars`` and the stream."""
    T, B, count, Np, Hq, Hkv = (fake.dim32() for _ in range(6))

    def rows(*shape: Any, stored: str = dtype) -> Any:
        step = 16 if stored == "u8" else 8
        return fake.tensor(stored, shape, (*(fake.dim(step) for _ in shape[1:]), 1))

    def vector(kind: str, size: Any) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4)

    gathered = None if paging.box else tuple(rows(fake.dim32(), dim) for dim in (config.dim, config.dim_v))
    of_kv = "u8" if config.fp8_kv else dtype
    ins = Inputs(
        rows(T, Hq, config.dim),
        rows(Np, paging.page, Hkv, config.dim, stored=of_kv),
        rows(Np, paging.page, Hkv, config.dim_v, stored=of_kv),
        vector("f32", Hq) if config.sink else None,
        vector("i32", count),
        Ends(vector("i32", B), fake.tensor("i32", (B, None), align=4), gathered),
        shared._scales(config, B, Hkv),
    )
    outs = Outputs(rows(T, Hq, config.dim_v), fake.tensor("f32", (T, Hq), align=4), None)
    return [ins, outs, Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(4))), fake.stream()]
