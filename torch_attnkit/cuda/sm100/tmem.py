"""Tensor memory as a warp sees it: 32 lanes, one row each, and columns of 32 bits (PTX ISA, "Tensor Memory").

Warp w of a warpgroup reaches lanes 32 (w % 4) to 32 (w % 4) + 31; an address is lane << 16 | column, and the lane field
of a warp's loads and stores must name its first lane. Imports cutlass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

COLUMNS = 512
_AT_ONCE = 32  # columns of one instruction: enough to pay its latency once, few enough to leave registers free


def pointer(dtype: Any, column: Any) -> cute.Pointer:
    """Lane 0 of a column, as the products take it."""
    return cute.make_ptr(dtype, Int32(column), cute.AddressSpace.tmem, assumed_align=16)


def lanes(base: Int32, warp: Int32) -> Int32:
    """The address of ``base``, a column of lane 0, for the loads and stores of a warp."""
    return base + ((warp % 4) << 21)


@dsl_user_op
def _load(address: Int32, count: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    outs = ",".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{outs}}}, [${count}];"
    struct = llvm.StructType.get_literal([T.f32()] * count)
    got = llvm.inline_asm(
        struct, [address.ir_value(loc=loc, ip=ip)], text, ",".join(["=f"] * count + ["r"]), has_side_effects=True,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return [
        Float32(llvm.extractvalue(T.f32(), got, ir.DenseI64ArrayAttr.get([i]), loc=loc, ip=ip)) for i in range(count)
    ]


@dsl_user_op
def _store(address: Int32, values: Sequence[Any], kind: str, *, loc: Any = None, ip: Any = None) -> None:
    count = len(values)
    ins = ",".join(f"${i + 1}" for i in range(count))
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{ins}}};"
    operands = [v.ir_value(loc=loc, ip=ip) for v in (address, *values)]
    llvm.inline_asm(
        None, operands, text, ",".join(["r"] + [kind] * count), has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def load(address: Int32, count: int) -> list[Float32]:
    """``count`` columns of this lane's row. They may be read after ``await_loads``."""
    got: list[Float32] = []
    while len(got) < count:
        n = min(_AT_ONCE, count - len(got))
        got += _load(address + len(got), n)
    return got


def store(address: Int32, values: Sequence[Any], kind: str = "f") -> None:
    """Columns of this lane's row; ``kind`` is "f" for Float32, "r" for Int32. Done after ``await_stores``."""
    for at in range(0, len(values), _AT_ONCE):
        _store(address + at, values[at : at + _AT_ONCE], kind)


def await_loads() -> None:
    cute.arch.fence_view_async_tmem_load()


def await_stores() -> None:
    cute.arch.fence_view_async_tmem_store()


@dsl_user_op
def before_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's tensor-memory work before a synchronisation that follows."""
    llvm.inline_asm(
        None, [], "tcgen05.fence::before_thread_sync;", "", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def after_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's tensor-memory work after a synchronisation that came before."""
    llvm.inline_asm(
        None, [], "tcgen05.fence::after_thread_sync;", "", has_side_effects=True, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
