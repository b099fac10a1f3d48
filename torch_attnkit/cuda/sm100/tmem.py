"""Tensor memory as a warp sees it: 32 lanes, one row each, and columns of 32 bits (PTX ISA, "Tensor Memory").

Warp w of a warpgroup reaches lanes 32 (w % 4) to 32 (w % 4) + 31; an address is lane << 16 | column, and the lane field
of a warp's loads and stores must name its first lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm

COLUMNS = 512
_COLUMNS = 32  # columns of one instruction: enough to pay its latency once, few enough to leave registers free


def pointer(dtype: Any, column: Any) -> cute.Pointer:
    """Lane 0 of a column, as the products take it."""
    return cute.make_ptr(dtype, Int32(column), cute.AddressSpace.tmem, assumed_align=16)


def lanes(base: Int32, warp: Int32) -> Int32:
    """The address of ``base``, a column of lane 0, for the loads and stores of a warp."""
    return base + ((warp % 4) << 21)


@dsl_user_op
def _load(address: Int32, count: int, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    outs = ",".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{outs}}}, [${count}];"
    return asm([Float32] * count, [address], text, volatile=True, loc=loc, ip=ip)


@dsl_user_op
def _store(address: Int32, values: Sequence[Any], *, loc: Any = None, ip: Any = None) -> None:
    count = len(values)
    ins = ",".join(f"${i + 1}" for i in range(count))
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{ins}}};"
    asm(None, [address, *values], text, volatile=True, loc=loc, ip=ip)


def load(address: Int32, count: int) -> list[Float32]:
    """``count`` columns of this lane's row. They may be read after ``await_loads``."""
    got: list[Float32] = []
    while len(got) < count:
        n = min(_COLUMNS, count - len(got))
        got += _load(address + len(got), n)
    return got


def store(address: Int32, values: Sequence[Any]) -> None:
    """Columns of this lane's row, Float32 or Int32. Done after ``await_stores``."""
    for at in range(0, len(values), _COLUMNS):
        _store(address + at, values[at : at + _COLUMNS])


def await_loads() -> None:
    cute.arch.fence_view_async_tmem_load()


def await_stores() -> None:
    cute.arch.fence_view_async_tmem_store()


@dsl_user_op
def before_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's tensor-memory work before a synchronisation that follows."""
    asm(None, [], "tcgen05.fence::before_thread_sync;", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def after_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's tensor-memory work after a synchronisation that came before."""
    asm(None, [], "tcgen05.fence::after_thread_sync;", volatile=True, loc=loc, ip=ip)
