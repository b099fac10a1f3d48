"""What the kernel for blocks of queries over pages is compiled for, and the groups of arguments that its functions pass
on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from torch_attnkit.cuda import fake

from .. import arguments as shared
from . import dynamic_types
from .multi_types import other_arguments, stored_as


@dataclass(frozen=True)
class Config(dynamic_types.Config):
    """What is fixed at compile time."""

    page: int = 1  # keys
    box: int = 0  # keys that TMA loads at once; 0: threads copy rows

    @property
    def boxes(self) -> int:
        """Of a block of keys, for each of its runs of columns."""
        return self.tile_n // self.box

    @property
    def loader_warps(self) -> int:
        """Of the producer's warpgroup, those that load keys."""
        most = 2 if self.group else 4  # two have other work
        if not self.box:
            return most
        return next(n for n in range(most, 0, -1) if self.boxes // self.ctas % n == 0)


class Inputs(NamedTuple):
    """E4M3 comes as bytes, which every torch hands over."""

    q: cute.Tensor  # (Tq, Hq, D)
    k: cute.Tensor  # (Np, Ps, Hkv, D)
    v: cute.Tensor  # (Np, Ps, Hkv, Dv)
    scales: Any  # of q, k and v, (B, Hkv) each; or None
    cu_q: cute.Tensor  # (B + 1)
    table: cute.Tensor  # (B, Mp)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where Scalars.has_sink is 0


class Rows(NamedTuple):
    """Of one sequence, as a dense batch of one has them."""

    q: cute.Tensor  # (1, T, Hq, D)
    sink: cute.Tensor  # (Hq)
    scales: Any  # of q, k and v, from the sequence's on; or None


def arguments(dtype: str, config: Any) -> list[Any]:
    """Stand-ins for what the host passes: ``Inputs``, ``Outputs``, ``Scalars`` and the stream."""
    T, B, count, Np, Hq, Hkv = (fake.dim32() for _ in range(6))
    stored = stored_as(dtype)
    ins = Inputs(
        shared._rows(stored, T, Hq, config.dim),
        shared._rows(stored, Np, config.page, Hkv, config.dim),
        shared._rows(stored, Np, config.page, Hkv, config.dim_v),
        shared._scales(config, B, Hkv),
        shared._vector("i32", count),
        fake.tensor("i32", (B, None), align=4),
        shared._vector("i32", B),
        shared._vector("f32", None),
    )
    return [ins, *other_arguments(dtype, config, T, Hq)]
