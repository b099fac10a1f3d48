"""``mma.sync`` with block scales, which sm_120f has: FP4 by FP4, m16n8k64, and E4M3 by FP4, m16n8k32.

Fragments of A are laid out as those of m16n8k32 bytes are: ``ldmatrix`` on rows of 32 bytes brings them. FP4 beside
E4M3 has a byte an element, its bits 2 to 5. A word of a lane holds scales of one row: for 64 elements of K in NVFP4 all
four bytes, in MXFP4 two of them, and one for 32 beside E4M3. Of operand A lane 4 g + t has the word of row 8 t + g of
32, which is two tiles of 16 rows; of operand B four tiles of 8 columns. The instruction takes a tile's by thread-id.
Source: PTX ISA, "Block Scaling for mma.sync".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm

A_TILES, B_TILES = 2, 4  # whose scales a word of each lane holds


@dataclass(frozen=True)
class Format:
    """How elements are multiplied."""

    k: int  # elements of a product
    kind: str
    a: str  # dtype of operand A; that of B is e2m1
    vectors: str  # .scale_vec_size
    scale: str  # dtype of a scale
    scale_bytes: int  # of a row of a product: where they begin in a word is a multiple of it


FORMATS = {
    "nvfp4": Format(64, "mxf4nvf4", "e2m1", "4X", "ue4m3", 4),
    "mxfp4": Format(64, "mxf4", "e2m1", "2X", "ue8m0", 2),
    "mxfp8": Format(32, "mxf8f6f4", "e4m3", "1X", "ue8m0", 1),
}


@dsl_user_op
def mma(
    format: Format, a: Any, b: Any, c: Any, scales: tuple[Any, Any], tiles: tuple[int, int], byte: int, *,
    loc: Any = None, ip: Any = None,
) -> tuple[Float32, ...]:  # fmt: skip
    """``(a * scales) (16, k) @ (b * scales) (k, 8) + c``: a has four registers, b two, c four floats.

    ``scales``: a lane's words of both operands; ``tiles``: which of their tiles; ``byte``: where in a word the scales
    begin.
    """
    text = (
        f"mma.sync.aligned.kind::{format.kind}.block_scale.scale_vec::{format.vectors}.m16n8k{format.k}.row.col"
        f".f32.{format.a}.e2m1.f32.{format.scale} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}}, "
        f"$14, {{{byte},{tiles[0]}}}, $15, {{{byte},{tiles[1]}}};"
    )
    return asm([Float32] * 4, [*a, *b, *c, *(Int32(s) for s in scales)], text, loc=loc, ip=ip)
