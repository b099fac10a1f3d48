"""What the kernel for blocks of queries over pages is compiled for, and the groups of arguments that its functions pass
on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import fake

from . import dynamic_types
from .multi_types import Outputs, Scalars


@dataclass(frozen=True)
class Config(dynamic_types.Config):
    """What is fixed at compile time."""

    page: int = 1  # keys
    box: int = 0  # keys that TMA loads at once; 0: threads copy rows

    @property
    def ctas(self) -> int:
        """That load each block together."""
        return 2 if self.pair else 1

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
    q: cute.Tensor  # (Tq, Hq, D)
    k: cute.Tensor  # (Np, Ps, Hkv, D)
    v: cute.Tensor  # (Np, Ps, Hkv, Dv)
    cu_q: cute.Tensor  # (B + 1)
    table: cute.Tensor  # (B, Mp)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where Scalars.has_sink is 0


class Rows(NamedTuple):
    """Of one sequence, as a dense batch of one has them."""

    q: cute.Tensor  # (1, T, Hq, D)
    sink: cute.Tensor  # (Hq)


def arguments(dtype: str, config: Config) -> list[Any]:
    """Stand-ins for what the host passes: ``Inputs``, ``Outputs``, ``Scalars`` and the stream."""
    T, B, count, Np, Hq, Hkv = (fake.dim32() for _ in range(6))

    def rows(*shape: Any) -> Any:
        return fake.tensor(dtype, shape, (*(fake.dim(8) for _ in shape[1:]), 1))

    def vector(kind: str, size: Any) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4)

    ins = Inputs(
        rows(T, Hq, config.dim),
        rows(Np, config.page, Hkv, config.dim),
        rows(Np, config.page, Hkv, config.dim_v),
        vector("i32", count),
        fake.tensor("i32", (B, None), align=4),
        vector("i32", B),
        vector("f32", None),
    )
    outs = Outputs(rows(T, Hq, config.dim_v), fake.tensor("f32", (T, Hq), align=4))
    return [ins, outs, Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6))), fake.stream()]
