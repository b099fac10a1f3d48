"""Products of FP4 numbers under block scales on Blackwell: ``tcgen05.mma`` of kinds ``mxf4`` and ``mxf4nvf4``.

    A (128 rows), B (N rows)   E2M1, two a byte, 256 numbers of a row in 128 bytes of shared memory that TMA swizzles
    scales                     shared memory -> tensor memory by ``tcgen05.cp``, in tiles of 128 rows x 4 scales
    D (128 lanes, N columns)   float32 sums in tensor memory

A tile of scales is 512 bytes: those of row r are the word at ``r % 32 * 16 + r // 32 * 4``, as the 128x4 layout of
``formats/scale_layout.py`` has them. In tensor memory it takes four columns. One product takes 64 numbers of a row:
four scales of 16 numbers, or two of 32, which are half a word. Source: PTX ISA 9.7.16.4 (descriptors), 9.7.16.10.7
(scales). Imports cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm

ROWS = 128  # of A, and of a tile of scales
ROW_BYTES = 128  # of a row in a stage
STAGE = 256  # numbers of a row in a stage
STEP = 64  # numbers of a row that a product takes
TILE_BYTES = 512  # of a tile of scales
TILE_COLUMNS = 4  # of a tile of scales in tensor memory
_STEP_BYTES = STEP // 2
_E2M1 = 1  # of the instruction descriptor, for both kinds
SWIZZLE_128B, SWIZZLE_NONE = 2, 0  # of a matrix descriptor


@dataclass(frozen=True)
class Product:
    """``block``: numbers under one scale, 16 (E4M3 scales) or 32 (E8M0); ``columns``: N."""

    block: int
    columns: int

    @property
    def tiles(self) -> int:
        """Tiles of scales that 128 rows of a stage have."""
        return STAGE // self.block // 4

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory that 128 rows' scales of a stage take."""
        return self.tiles * TILE_COLUMNS

    def place(self, step: int) -> tuple[int, int]:
        """Which tile has the scales of a step of a stage, and which byte of its words is their first."""
        each = STEP // self.block
        return step * each // 4, step * each % 4

    def instruction(self, step: int) -> int:
        """The instruction descriptor (Table 44): types, N, kind of scales, M and the scales' bytes of A and B."""
        byte = self.place(step)[1]
        e8m0 = int(self.block == 32)
        word = _E2M1 << 7 | _E2M1 << 10 | self.columns >> 3 << 17 | e8m0 << 23 | ROWS >> 7 << 27
        return word | byte << 4 | byte << 29

    @property
    def kind(self) -> str:
        return "mxf4nvf4.block_scale.block16" if self.block == 16 else "mxf4.block_scale.block32"


def matrix(address: Int32, group_bytes: int, swizzle: int) -> Int64:
    """A matrix whose rows follow each other in groups of 8, ``group_bytes`` apart."""
    fixed = 1 << 16 | group_bytes >> 4 << 32 | 1 << 46 | swizzle << 61
    return Int64((Int32(address) >> 4) & 0x3FFF) | Int64(fixed)


def operand(address: Int32) -> Int64:
    """The numbers of a stage at ``address``, a multiple of 1024."""
    return matrix(address, 8 * ROW_BYTES, SWIZZLE_128B)


@dsl_user_op
def _copy(tensor: Int32, source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    text = "tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;"
    asm(None, [Int32(tensor), Int64(source)], text, memory=True, loc=loc, ip=ip)


def scale_tile(address: Int32) -> Int64:
    """A tile of scales in shared memory; further ones are ``advanced``."""
    return matrix(address, 8 * 16, SWIZZLE_NONE)


def advanced(matrix: Int64, nbytes: Any) -> Int64:
    """The same, so many bytes further on: a multiple of 16 within shared memory, which leaves other fields alone."""
    return matrix + Int64(nbytes // 16 if isinstance(nbytes, int) else Int32(nbytes) >> 4)


def copy_scales(tensor: Int32, tile: Int64) -> None:
    """A tile of scales from shared to tensor memory, for the products that follow. By one thread."""
    _copy(tensor, tile)


@dsl_user_op
def _multiply(
    kind: str, d: Int32, a: Int64, b: Int64, instruction: Int32, scale_a: Int32, scale_b: Int32, accumulate: Int32, *,
    loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; "
        f"tcgen05.mma.cta_group::1.kind::{kind} [$0], $1, $2, $3, [$4], [$5], p; }}"
    )
    values = [Int32(d), Int64(a), Int64(b), Int32(instruction), Int32(scale_a), Int32(scale_b), Int32(accumulate)]
    asm(None, values, text, memory=True, loc=loc, ip=ip)


def multiply(
    product: Product, step: int, d: Int32, a: Int64, b: Int64, scale_a: Int32, scale_b: Int32, accumulate: Int32
) -> None:
    """A step of a stage. ``a``, ``b``: ``operand`` of its numbers; ``scale_a``, ``scale_b``: the first columns
    of the stage's scales; ``accumulate`` 0 forgets what is in ``d``. By one thread."""
    tile, byte = product.place(step)
    word = product.instruction(step)
    word -= (word >> 31) << 32
    at = [Int32(s + tile * TILE_COLUMNS) | Int32((byte << 30) - ((byte >> 1) << 32)) for s in (scale_a, scale_b)]
    _multiply(product.kind, d, *(advanced(m, step * _STEP_BYTES) for m in (a, b)), Int32(word), *at, accumulate)


@dsl_user_op
def e2m1_pairs(values: list[Any], *, loc: Any = None, ip: Any = None) -> Int32:
    """E2M1 codes of eight numbers, the first in bits 0..3: to nearest, ties to even, at most 6; NaN is +6."""
    parts = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1}; " for i in range(4))
    text = f"{{ .reg .b8 b0, b1, b2, b3; {parts}mov.b32 $0, {{b0, b1, b2, b3}}; }}"
    return asm(Int32, list(values), text, loc=loc, ip=ip)


@dsl_user_op
def _larger(top: Float32, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return asm(Float32, [Float32(top), Float32(a), Float32(b)], "max.abs.f32 $0, $1, $2, $3;", loc=loc, ip=ip)


def amax(values: list[Any]) -> Float32:
    """The largest magnitude of an even count of numbers. NaN is skipped; nothing but NaN gives 0."""
    top = Float32(0)
    for i in range(0, len(values), 2):
        top = _larger(top, values[i], values[i + 1])
    return top
