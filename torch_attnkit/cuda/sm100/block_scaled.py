"""FP4 products with block scales on Blackwell: ``tcgen05.mma`` of kinds mxf4nvf4 and mxf4, and scales in tensor memory.

    codes   shared memory, rows of 128 bytes (256 numbers along K) as TMA swizzles them: matrix descriptors
    scales  128x4 tiles of 512 bytes in shared memory -> tcgen05.cp -> 4 columns of tensor memory, in all four warps'
            lanes: row r's four scales along K are the word in lane r % 32, column r / 32
    sums    float32 in tensor memory

A product multiplies 64 numbers of K: of NVFP4 (E4M3 scales, blocks of 16) with all four scales of a tile, of MXFP4
(UE8M0, blocks of 32) with two, so a tile serves two products. One thread issues copies and products; they run in the
order of issue. Source: PTX ISA, "Block Scaling for tcgen05.mma", "tcgen05.cp".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm
from .products import ROWS, descriptor

K = 64  # numbers of a product
ROW_BYTES = 128  # of a swizzled row of codes
ROW_ELEMENTS = 2 * ROW_BYTES
TILE_BYTES = 512  # of 128 rows' scales, four each
TILE_COLUMNS = 4  # of tensor memory that it takes
_E2M1 = 1  # in an instruction descriptor


@dataclass(frozen=True)
class Format:
    """How the numbers of a format are multiplied."""

    kind: str  # of tcgen05.mma
    block: int  # numbers of a scale
    e8m0: bool  # scales are powers of two

    @property
    def tile_elements(self) -> int:
        """Along K, under the four scales of a tile."""
        return 4 * self.block

    @property
    def tiles(self) -> int:
        """Of scales, for a row of codes in shared memory."""
        return ROW_ELEMENTS // self.tile_elements

    def instruction(self, columns: int, step: int) -> int:
        """The descriptor of product ``step`` of a row of codes, 128 rows x ``columns``: which scales of a tile it
        takes is in it twice."""
        scale = step * K // self.block % 4
        return (
            scale << 4 | _E2M1 << 7 | _E2M1 << 10 | columns >> 3 << 17 | int(self.e8m0) << 23 | ROWS >> 7 << 27
            | scale << 29
        )  # fmt: skip


FORMATS = {
    "nvfp4": Format("mxf4nvf4.block_scale.block16", 16, False),
    "mxfp4": Format("mxf4.block_scale.block32", 32, True),
}


def scales_descriptor(address: Int32) -> Int64:
    """Of a tile of scales: 32 rows of 16 bytes, one behind another."""
    return descriptor(address, TILE_BYTES // 32)


def word_of_row(row: Int32) -> Int32:
    """Where in a tile the scales of a row are, four bytes."""
    return row % 32 * 16 + row // 32 * 4


@dsl_user_op
def copy_scales(column: Int32, descriptor: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """A tile of scales to four columns of tensor memory. One thread calls this."""
    text = "tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;"
    asm(None, [Int32(column), descriptor], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def multiply(
    format: Format, instruction: int, sums: Int32, rows: Int64, columns: Int64, row_scales: Int32,
    column_scales: Int32, accumulate: Int32, *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Issue a product: ``sums``, ``row_scales`` and ``column_scales`` are columns of tensor memory, ``rows`` and
    ``columns`` descriptors of codes. One thread calls this."""
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, $6, 0; tcgen05.mma.cta_group::1.kind::{format.kind} "
        "[$0], $1, $2, $3, [$4], [$5], p; }"
    )
    operands = [Int32(sums), rows, columns, Int32(instruction), Int32(row_scales), Int32(column_scales)]
    asm(None, [*operands, Int32(accumulate)], text, memory=True, loc=loc, ip=ip)
