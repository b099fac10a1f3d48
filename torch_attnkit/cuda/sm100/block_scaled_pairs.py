"""``block_scaled.py`` for a pair of CTAs: ``tcgen05.mma.cta_group::2`` under block scales, 256 rows.

    rows     128 in either CTA, whose sums are in the lanes of its own tensor memory
    columns  half of their codes in either CTA; both CTAs have sums of all columns
    scales   in either CTA's tensor memory: those of its own rows, and those of all columns

Operands and scales have the same addresses in both CTAs, whose tiles one copy brings. One thread of the pair's first
CTA issues copies and products for both. Source: PTX ISA, "Block Scaling for tcgen05.mma", "tcgen05.cp".
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm
from .block_scaled import Format
from .products import ROWS

CTAS = 2
_MORE_ROWS = ROWS >> 7 << 27  # in an instruction descriptor: twice as many


@dsl_user_op
def copy_scales(column: Int32, descriptor: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """In both CTAs a tile of scales to four columns of tensor memory. One thread calls this."""
    text = "tcgen05.cp.cta_group::2.32x128b.warpx4 [$0], $1;"
    asm(None, [Int32(column), descriptor], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def multiply(
    format: Format, instruction: int, sums: Int32, rows: Int64, columns: Int64, row_scales: Int32,
    column_scales: Int32, accumulate: Int32, *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Issue a product of 256 rows: as ``block_scaled.multiply``, of whose products ``instruction`` is one."""
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, $6, 0; tcgen05.mma.cta_group::2.kind::{format.kind} "
        "[$0], $1, $2, $3, [$4], [$5], p; }"
    )
    operands = [Int32(sums), rows, columns, Int32(instruction + _MORE_ROWS), Int32(row_scales), Int32(column_scales)]
    asm(None, [*operands, Int32(accumulate)], text, memory=True, loc=loc, ip=ip)
