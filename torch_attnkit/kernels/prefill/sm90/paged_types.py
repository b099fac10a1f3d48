"""What the kernel for blocks of queries over pages is compiled for, and the groups of arguments that its functions pass
on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import fake

from .. import arguments as shared
from . import multi_types
from .multi_types import other_arguments, stored_as

_SHARED_MEMORY, _BARRIERS = 227 << 10, 2 << 10  # bytes: of a CTA, and what barriers and notes take of it at most


@dataclass(frozen=True)
class Config(multi_types.Config):
    """What is fixed at compile time."""

    page: int = 1  # keys
    box: int = 0  # keys that TMA loads at once; 0: threads copy rows
    group: int = 0  # query heads of a KV head, where persistent CTAs draw their work tiles; else 0

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

    @property
    def span(self) -> int:
        """Rows of a tile that persistent CTAs draw: whole queries, with all their heads."""
        return self.tile_m // self.group * self.group

    @property
    def q_stages(self) -> int:
        """Of rows, where persistent CTAs load those of the next work tile: two if there is room."""
        rows = self.tile_m * self.dim * self.dtype.width // 8
        return 2 if self.staged_bytes + rows + _BARRIERS <= _SHARED_MEMORY else 1

    @property
    def box_columns(self) -> int:
        """Of a box: what a row of the swizzled layout has, 128 or 64 bytes."""
        return 64 if self.dim % 64 == 0 and self.dim_v % 64 == 0 else 32


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


class Draws(NamedTuple):
    """Of which persistent CTAs draw their work tiles, and how many CTAs there are at most."""

    count: cute.Tensor  # one zero
    ctas: Int32


def draws() -> Draws:
    """Stand-ins for these."""
    return Draws(fake.tensor("i32", (None,), (None,), align=4), Int32(0))


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
