"""What the kernel for blocks of queries over E4M3 is compiled for, and the arguments that it has beyond ``Multi``'s."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from torch_attnkit.cuda import fake

from . import multi_types
from .multi_types import Outputs, Scalars

TURNING_WARPS = 3  # of the producer's warpgroup: those that do not load


@dataclass(frozen=True)
class Config(multi_types.Config):
    """What is fixed at compile time. ``stages`` are those of K, and of V as it comes."""

    turned: int = 2  # stages of V turned around
    promote: bool = True  # sums of several blocks of keys are added up in float32

    @property
    def out_dtype(self) -> Any:
        return BFloat16

    @property
    def lift(self) -> int:
        """Probabilities, their sums and the output so far are 2^lift times what they stand for, see ``types.py``."""
        return 8

    @property
    def padded(self) -> bool:
        """Keys at which nobody looks are zeros since V was turned around."""
        return False

    @property
    def scales(self) -> tuple[bool, ...]:
        """All three are given; where a call has none they are ones."""
        return (True, True, True)

    @property
    def staged_bytes(self) -> int:
        """Of Q, K, V as it comes and V turned around in shared memory."""
        return self.tile_m * self.dim + self.tile_n * (self.stages * (self.dim + self.dim_v) + self.turned * self.dim_v)


class Inputs(NamedTuple):
    """E4M3 comes as bytes, which every torch hands over."""

    q: cute.Tensor  # (B, T, Hq, D)
    k: cute.Tensor  # (B, Hkv, S, D)
    v: cute.Tensor  # (B, Hkv, S, Dv)
    kv_len: cute.Tensor  # (B)
    sink: cute.Tensor  # (Hq), anything where Scalars.has_sink is 0
    kv_start: cute.Tensor  # (B), likewise with has_start
    scales: Any  # of q, k and v, (B, Hkv) each


class Place(NamedTuple):
    """Of a work tile, for ``scales.py``."""

    batch: Int32
    head: Int32  # a query head


def arguments(config: Config) -> list[Any]:
    """Stand-ins for what the host passes: ``Inputs``, ``Outputs``, ``Scalars`` and the stream."""
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))

    def rows(kind: str, *shape: Any) -> Any:
        step = 16 if kind == "u8" else 8
        return fake.tensor(kind, shape, (*(fake.dim(step) for _ in shape[1:]), 1))

    def vector(kind: str, size: Any) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4)

    ins = Inputs(
        rows("u8", B, T, Hq, config.dim),
        rows("u8", B, Hkv, S, config.dim),
        rows("u8", B, Hkv, S, config.dim_v),
        vector("i32", B),
        vector("f32", None),
        vector("i32", B),
        tuple(fake.tensor("f32", (B, Hkv), align=4) for _ in range(3)),
    )
    outs = Outputs(rows("bf16", B, T, Hq, config.dim_v), fake.tensor("f32", (B, T, Hq), align=4))
    return [ins, outs, Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6))), fake.stream()]
