"""Prefetches into the L2."""

from __future__ import annotations

from typing import Any

from cutlass import Int64
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm

LINE = 128  # bytes


@dsl_user_op
def prefetch(source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Prefetch a line of device memory."""
    asm(None, [Int64(source)], "prefetch.global.L2 [$0];", memory=True, loc=loc, ip=ip)
