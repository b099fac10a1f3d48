"""Device side of sdpa_multi on Hopper: ``cuda/sm90/multi.py``."""

from typing import Any

from cutlass import Float32, Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm90.multi import Multi
from torch_attnkit.cuda.sm90.multi_types import Config, Inputs, Outputs, Scalars


def trace(arch: str, *, dtype: str, **sizes: Any) -> tuple[Any, list[Any]]:
    """What to compile. Rows of q and of the caches start at multiples of 16 bytes, as vectors and TMA need."""
    config = Config(fake.dtype(dtype), **sizes)
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))

    def rows(*shape: Any) -> Any:
        return fake.tensor(dtype, shape, (*(fake.dim(8) for _ in shape[1:]), 1))

    def vector(kind: str, size: Any) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4)

    ins = Inputs(
        rows(B, T, Hq, config.dim),
        rows(B, Hkv, S, config.dim),
        rows(B, Hkv, S, config.dim_v),
        vector("i32", B),
        vector("f32", None),
        vector("i32", B),
    )
    outs = Outputs(rows(B, T, Hq, config.dim_v), fake.tensor("f32", (B, T, Hq), align=4))
    scalars = Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(6)))
    return Multi(config), [ins, outs, scalars, fake.stream()]
