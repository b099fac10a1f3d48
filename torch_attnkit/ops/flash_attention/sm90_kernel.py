"""Device side of flash_attention on Hopper: ``cuda/sm90/prefill.py`` on dense batches."""

from typing import Any

from cutlass import Float32, Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm90.prefill import Prefill
from torch_attnkit.cuda.sm90.prefill_types import Config, Inputs, Outputs, Scalars


def trace(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile. Strides of q, k, v and out are multiples of 16 bytes, as TMA and the stores need."""
    name = signature.pop("dtype")
    config = Config(dtype=fake.dtype(name), **signature)
    B, T, S, Hq, Hkv = (fake.dim32() for _ in range(5))

    def rows(*shape: Any) -> Any:
        return fake.tensor(name, shape, (*(fake.dim(8) for _ in shape[1:]), 1))

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (B, T, Hq), align=4) if on else None

    def vector(kind: str, size: Any, on: bool) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4) if on else None

    ins = Inputs(
        rows(B, T, Hq, config.dim),
        rows(B, S, Hkv, config.dim),
        rows(B, S, Hkv, config.dim_v),
        vector("f32", Hq, config.sink),
        vector("i32", B, config.kv_start),
        vector("i32", B, config.kv_len),
    )
    outs = Outputs(rows(B, T, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    scalars = Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(4)))
    return Prefill(config), [ins, outs, scalars, fake.stream()]
