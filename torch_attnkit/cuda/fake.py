"""Stand-ins for the arguments of a host function: dtype, rank and layout of tensors that do not exist yet.

Imports cutlass, so kernel modules use it, and nothing that runs without compiling.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

_DTYPES = {
    "f64": cutlass.Float64,
    "f32": cutlass.Float32,
    "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "f8e4m3": cutlass.Float8E4M3FN,
    "f8e5m2": cutlass.Float8E5M2,
    "f8e8m0": cutlass.Float8E8M0FNU,
    "u8": cutlass.Uint8,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "bool": cutlass.Boolean,
}


def dtype(name: str) -> Any:
    """The CuTeDSL type of a dtype in the table's words."""
    return _DTYPES[name]


def dim(div: int = 1) -> Any:
    """A size or stride known at the call, a multiple of ``div``; 64 bits, so offsets made from it are too."""
    return cute.sym_int64(divisibility=div)


def dim32(div: int = 1) -> Any:
    """The same in 32 bits."""
    return cute.sym_int32(divisibility=div)


def tensor(name: str, shape: tuple[Any, ...], stride: tuple[Any, ...] | None = None, *, align: int = 16) -> Any:
    """A tensor of a dtype in the table's words. Entries are ints (fixed), ``dim()`` objects, or None (a new ``dim()``).

    Without ``stride`` the last axis has stride 1 and the others any. ``align`` is in bytes and checked at the call.
    """
    if stride is None:
        stride = (None,) * (len(shape) - 1) + (1,) if shape else ()
    sizes, steps = (tuple(dim() if s is None else s for s in entries) for entries in (shape, stride))
    return make_fake_tensor(_DTYPES[name], sizes, steps, assumed_align=align)


def stream() -> Any:
    """The stream, last of the arguments: torch's current one at every call, so the caller passes none."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
