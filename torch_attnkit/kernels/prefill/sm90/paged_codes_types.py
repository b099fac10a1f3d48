"""What the kernel for blocks of queries over pages of E4M3 is compiled for, and its arguments."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

from . import multi_codes_types
from .multi_types import Outputs, Scalars


@dataclass(frozen=True)
class Config(multi_codes_types.Config):
    """What is fixed at compile time; the properties are what ``page_loads.Boxes`` asks for."""

    page: int = 8  # keys
    box: int = 8  # keys that TMA loads at once

    @property
    def ctas(self) -> int:
        """That load each block together."""
        return 2 if self.pair else 1

    @property
    def boxes(self) -> int:
        """Of a block of keys, for each of its runs of columns."""
        return self.tile_n // self.box

    loader_warps = 1  # the others of the producer's warpgroup turn V around

    @property
    def box_columns(self) -> int:
        """Of K's boxes: what a row of the swizzled layout has, in bytes."""
        return next(columns for columns in (128, 64, 32) if self.dim % columns == 0)


class Inputs(NamedTuple):
    """E4M3 comes as bytes, which every torch hands over."""

    q: cute.Tensor  # (Tq, Hq, D)
    k: cute.Tensor  # (Np, Ps, Hkv, D)
    v: cute.Tensor  # (Np, Ps, Hkv, Dv)
    scales: Any  # of q, k and v, (B, Hkv) each
    cu_q: cute.Tensor  # (B + 1)
    table: cute.Tensor  # (B, Mp)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where Scalars.has_sink is 0


class Rows(NamedTuple):
    """Of one sequence, as a dense batch of one has them."""

    q: cute.Tensor  # (1, T, Hq, D)
    sink: cute.Tensor  # (Hq)
    scales: Any  # of q, k and v, from the sequence's on


def arguments(config: Config) -> list[Any]:
    """Stand-ins for what the host passes: ``Inputs``, ``Outputs``, ``Scalars`` and the stream."""
    T, B, count, Np, Hq, Hkv = (fake.dim32() for _ in range(6))

    def rows(kind: str, *shape: Any) -> Any:
        step = 16 if kind == "u8" else 8
        return fake.tensor(kind, shape, (*(fake.dim(step) for _ in shape[1:]), 1))

    def vector(kind: str, size: Any) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4)

    ins = Inputs(
        rows("u8", T, Hq, config.dim),
        rows("u8", Np, config.page, Hkv, config.dim),
        rows("u8", Np, config.page, Hkv, config.dim_v),
        tuple(fake.tensor("f32", (B, Hkv), align=4) for _ in range(3)),
        vector("i32", count),
        fake.tensor("i32", (B, None), align=4),
        vector("i32", B),
        vector("f32", None),
    )
    outs = Outputs(rows("bf16", T, Hq, config.dim_v), fake.tensor("f32", (T, Hq), align=4))
    return [ins, outs, Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6))), fake.stream()]
