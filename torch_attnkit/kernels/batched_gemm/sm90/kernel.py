"""What to compile for products of groups on Hopper."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from torch_attnkit.cuda import fake

from ...grouped_gemm.arguments import Matrices
from ...grouped_gemm.sm90.config import CODE_ALIGNMENT, WgmmaConfig
from ..plan import CHUNK
from .fp4_few import Fp4FewTokens
from .fp4_few_codes import Fp4FewCodes
from .fp4_tokens import Tokens
from .fp4_wgmma import Fp4GroupProducts
from .plan import Few, Tile
from .wgmma import GroupProducts


def trace_wgmma(arch: str, dtypes: tuple[str, str], config: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """``dtypes`` of the operands and of the result; ``config``: a ``Tile``."""

    def rows(dtype: str) -> Any:
        return fake.tensor(dtype, (None, None, fake.dim(CHUNK)), (fake.dim(CHUNK), fake.dim(CHUNK), 1), align=16)

    made = GroupProducts(Tile(*config), *(fake.dtype(name) for name in dtypes))
    return made, [rows(dtypes[0]), rows(dtypes[0]), rows(dtypes[1]), Int32(0), fake.stream()]


def trace_fp4_wgmma(
    arch: str, *, format: str, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool], widths: tuple[int, ...],
    group: int, warps: int, code_alignment: int, scale_vector: int, o_alignment: int, even: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """As ``Fp4Plan`` has them; ``swizzled``: scales are in the 128x4 layout."""
    config = WgmmaConfig(format, warps, "bf16", "none", widths[-1], False, scale_vector, code_alignment, widths, group)
    x, factor = fake.tensor("bf16", (None, None), (fake.dim(8), 1)), fake.tensor("f32", (None,), (1,), align=4)
    out = fake.tensor(out_dtype, (None, None, None), align=4 if even else 2)
    made = Fp4GroupProducts(config, Tokens(format, swizzled, o_alignment), divisors, even)
    return made, [*_coded(o_alignment, code_alignment), x, factor, out, (Int32(0),) * 4, fake.stream()]


def trace_fp4_few(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    return _few(Fp4FewTokens, **signature)


def trace_fp4_few_codes(arch: str, **signature: Any) -> tuple[Any, list[Any]]:
    return _few(Fp4FewCodes, **signature)


def _few(
    kernel: type[Fp4FewTokens], *, out_dtype: str, swizzled: bool, divisors: tuple[bool, bool],
    config: tuple[Any, ...], o_alignment: int, even: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """``config``: a ``Few``."""
    few = Few(*config)
    out = fake.tensor(out_dtype, (None, None, None), align=8 if even else 2)
    made = kernel(few, Tokens(few.format, swizzled, o_alignment), divisors, even)
    return made, [*_coded(o_alignment, CODE_ALIGNMENT), out, fake.stream()]


def _coded(o_alignment: int, code_alignment: int) -> list[Any]:
    """o, its scales, both global scales, and the weights."""
    one = fake.tensor("f32", (1,), (1,), align=4)
    unused = [fake.tensor("f32", (None,) * axes, align=4) for axes in (2, 1, 1)]
    weights = Matrices(_codes(code_alignment), _bytes(), *unused)
    return [_codes(o_alignment), _bytes(), one, one, weights]


def _codes(alignment: int) -> Any:
    a = alignment
    return fake.tensor("u8", (fake.dim(), fake.dim(), fake.dim(a)), (fake.dim(a), fake.dim(a), 1), align=a)


def _bytes() -> Any:
    return fake.tensor("u8", (None, None, None), align=1)
