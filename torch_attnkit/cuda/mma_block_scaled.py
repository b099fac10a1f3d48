"""``mma.sync`` of FP4 with block scales, m16n8k64, which sm_120f has: kinds mxf4nvf4 (NVFP4) and mxf4 (MXFP4).

Fragments of codes are laid out as those of m16n8k32 bytes are: ``ldmatrix`` on rows of 32 bytes brings them. A word of
a lane holds the scales of one row and 64 elements of K: of NVFP4 all four bytes, of MXFP4 two of them. Of operand A
lane 4 g + t has the word of row 8 t + g of 32, which is two tiles of 16 rows; of operand B four tiles of 8 columns.
The instruction takes a tile's by thread-id. Source: PTX ISA, "Block Scaling for mma.sync".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm

K = 64  # elements of a product
A_TILES, B_TILES = 2, 4  # whose scales a word of each lane holds


@dataclass(frozen=True)
class Format:
    """How elements of a format are multiplied."""

    kind: str
    vectors: str  # .scale_vec_size
    scale: str  # dtype of a scale
    scale_bytes: int  # of a row of a product: where they begin in a word is a multiple of it


FORMATS = {
    "nvfp4": Format("mxf4nvf4", "4X", "ue4m3", 4),
    "mxfp4": Format("mxf4", "2X", "ue8m0", 2),
}


@dsl_user_op
def mma(
    format: Format, a: Any, b: Any, c: Any, scales: tuple[Any, Any], tiles: tuple[int, int], byte: int, *,
    loc: Any = None, ip: Any = None,
) -> tuple[Float32, ...]:  # fmt: skip
    """``(a * scales) (16, 64) @ (b * scales) (64, 8) + c``: a has four registers, b two, c four floats.

    ``scales``: a lane's words of both operands; ``tiles``: which of their tiles; ``byte``: where in a word the scales
    begin.
    """
    text = (
        f"mma.sync.aligned.kind::{format.kind}.block_scale.scale_vec::{format.vectors}.m16n8k64.row.col"
        f".f32.e2m1.e2m1.f32.{format.scale} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}}, "
        f"$14, {{{byte},{tiles[0]}}}, $15, {{{byte},{tiles[1]}}};"
    )
    return asm([Float32] * 4, [*a, *b, *c, *(Int32(s) for s in scales)], text, loc=loc, ip=ip)
