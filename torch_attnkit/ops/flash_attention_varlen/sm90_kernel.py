"""Device side of flash_attention_varlen on Hopper: ``cuda/sm90/prefill.py`` on packed sequences."""

from typing import Any

from cutlass import Float32, Int32

from torch_attnkit.cuda import fake
from torch_attnkit.cuda.sm90.prefill import Prefill
from torch_attnkit.cuda.sm90.prefill_types import Config, Inputs, Outputs, Scalars


def trace(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile. Strides of q, k, v and out are multiples of 16 bytes, as TMA and the stores need."""
    name = signature.pop("dtype")
    config = Config(dtype=fake.dtype(name), varlen=True, **signature)
    Tq, Tk, Hq, Hkv, ends = (fake.dim32() for _ in range(5))

    def rows(*shape: Any) -> Any:
        return fake.tensor(name, shape, (fake.dim(8), fake.dim(8), 1))

    def per_row(on: bool) -> Any:
        return fake.tensor("f32", (Tq, Hq), align=4) if on else None

    def vector(kind: str, size: Any) -> Any:
        return fake.tensor(kind, (size,), (None,), align=4)

    ins = Inputs(
        rows(Tq, Hq, config.dim),
        rows(Tk, Hkv, config.dim),
        rows(Tk, Hkv, config.dim_v),
        vector("f32", Hq) if config.sink else None,
        vector("i32", ends),
        vector("i32", ends),
    )
    outs = Outputs(rows(Tq, Hq, config.dim_v), per_row(True), per_row(not config.normalize))
    scalars = Scalars(Float32(0), Float32(0), *(Int32(0) for _ in range(4)))
    return Prefill(config), [ins, outs, scalars, fake.stream()]
