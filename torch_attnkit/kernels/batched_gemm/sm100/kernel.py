"""What to compile for products of groups on Blackwell."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake

from .block_scaled import Coded, Fp4GroupProducts
from .plan import Fp4Tile


def trace_fp4(
    arch: str, *, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], config: tuple[Any, ...], even: int
) -> tuple[Any, list[Any]]:
    """``config``: an ``Fp4Tile``; ``even``: results that are stored at once."""
    out = fake.tensor(out_dtype, (None, None, None), align=even * fake.dtype(out_dtype).width // 8)
    one = fake.tensor("f32", (1,), (1,), align=4)
    made = Fp4GroupProducts(Fp4Tile(*config), swizzled, divisors, even)
    operands = [Coded(_bytes(16, 16), _bytes(4, 16 if swizzled else 4)) for _ in range(2)]
    return made, [*operands, one, one, out, Int32(0), fake.stream()]


def _bytes(step: int, align: int) -> Any:
    """(G, rows, bytes)."""
    return fake.tensor("u8", (None, None, None), (fake.dim(step), fake.dim(step), 1), align=align)
