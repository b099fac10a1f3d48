"""Bulk prefetches into the L2, from Hopper on."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm


@dsl_user_op
def prefetch_bulk(source: Int64, nbytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Each thread prefetches a range of device memory: begin and size are multiples of 16 bytes."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    asm(None, [Int64(source), Int32(nbytes)], text, memory=True, loc=loc, ip=ip)
