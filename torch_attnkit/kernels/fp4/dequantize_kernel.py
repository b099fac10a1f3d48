"""Device side of the dequantisers: E2M1 codes and a scale per block to rows of numbers.

    thread: scale byte -> the numbers of codes 0 to 7, rounded -> table of bytes
            eight codes -> four at a time looked up in the table -> signs -> 16 bytes of x, 32 of float32

The numbers of a block are only eight and their negatives: they are worked out and rounded before any code is looked at,
and a byte permutation finds one byte of four of them in one instruction. Of the quotients by global_scale two are
divisions, of 1/2 and of 3/2 scales; the others are these times powers of two, exact since the smallest is normal.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda import copies, fake, fp4
from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.warp_ops import fma, pack
from torch_attnkit.formats.nvfp4 import GLOBAL_SCALE_MAX

from . import rows
from .plan import CODES, Config
from .problem import BLOCK

_LEAST = 2.0**-100  # of a global scale under which no quotient or remainder leaves the normal numbers


class _Dequantizer:
    def __init__(self, format: str, swizzled: bool, dense: bool, config: Config):
        self.nvfp4 = format == "nvfp4"
        self.shift = (BLOCK[format] // CODES).bit_length() - 1  # 2^shift groups of codes are under one scale
        self.swizzled, self.dense, self.c = swizzled, dense, config

    @cute.jit
    def __call__(
        self,
        mCodes: cute.Tensor,  # (..., K/2)
        mScale: cute.Tensor,  # (..., K/block) or (padded rows, padded K/block)
        mGlobal: cute.Tensor | None,  # ()
        mX: cute.Tensor,  # (..., K), contiguous
        units: Int32,  # groups of codes
        where: tuple,  # the arguments of ``place`` behind its first
        stream: cuda.CUstream,
    ):
        share = const_expr(self.c.threads * self.c.units)
        self.kernel(mCodes, mScale, mGlobal, mX, units, where).launch(
            grid=((units + (share - 1)) // share, 1, 1), block=(self.c.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mCodes: cute.Tensor,
        mScale: cute.Tensor,
        mGlobal: cute.Tensor | None,
        mX: cute.Tensor,
        units: Int32,
        where: tuple,
    ):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        gs = None
        if const_expr(mGlobal is not None):
            gs = copies.scalar(mGlobal.iterator)
            inverse = fp4.divide(Float32(1), gs)
            gs = (gs, inverse, (gs >= _LEAST) & (gs <= GLOBAL_SCALE_MAX))
        unit = [(cta * c.units + u) * c.threads + tid for u in range(c.units)]
        rCodes = [copies.fragments(4 // c.width, c.width, mCodes.element_type) for _ in range(c.units)]
        rScale = copies.fragments(c.units, 1, mScale.element_type)
        for u in cutlass.range_constexpr(c.units):
            if unit[u] < units:
                codes, scale = self.place(unit[u], *where)
                rows.load(mCodes.iterator + codes, rCodes[u])
                copies.load(mScale.iterator + scale, rScale[u])
        for u in cutlass.range_constexpr(c.units):
            if unit[u] < units:
                words = self.numbers(self.word(rCodes[u]), Int32(rScale[u][0]), gs, mX.element_type)
                x = mX.iterator + Int64(unit[u]) * CODES
                for i in cutlass.range_constexpr(0, len(words), 4):
                    rows.store_words(words[i : i + 4], x + i * (CODES // len(words)))

    def place(
        self,
        unit: Int32,
        per_row: Int32,  # groups of codes
        reciprocal: tuple,  # of per_row
        sizes: tuple,  # of the batch axes after merging
        steps: tuple,  # strides of codes
        scale_steps: tuple,
        columns: Int32,  # of the 128x4 scales
        pitch: Int64,  # bytes from one of their rows to the next
    ):
        """The bytes before a group of codes, and before its scale."""
        if self.c.flat:
            return Int64(unit) * (CODES // 2), Int64(unit >> self.shift)
        row = rows.quotient(unit, reciprocal)
        column = unit - row * per_row
        codes = rows.offset(row, sizes, steps) + Int64(column) * (CODES // 2)
        k = column >> self.shift
        if not self.swizzled:
            return codes, rows.offset(row, sizes, scale_steps) + k
        tile = (row >> 7) * (columns >> 2) + (k >> 2)
        scale = Int64(tile) * 512 + ((row & 31) * 16 + ((row >> 5) & 3) * 4 + (k & 3))
        if not self.dense:
            scale = scale // columns * pitch + scale % columns
        return codes, scale

    def word(self, vectors: list[Any]) -> Int32:
        """Four bytes as one number."""
        if self.c.width == 4:
            return cute.recast_tensor(vectors[0], Int32)[0]
        word = Int32(0)
        for i in range(4):
            word = word | (Int32(vectors[i // self.c.width][i % self.c.width]) << (8 * i))
        return word

    def numbers(self, codes: Int32, byte: Int32, gs: Any, dtype: Any):
        """The numbers of eight codes, as words of 16-bit pairs or of float32."""
        planes = self.planes(self.magnitudes(byte, gs), dtype)
        found, negative = [], Int32(0)
        if self.nvfp4:
            one = -(1 << 31) if dtype is Float32 else -(1 << 31) | 0x8000
            negative = Int32(cutlass.select_(byte >= 128, Int32(one), Int32(0)))
        for half in range(2):
            four = codes >> (16 * half)
            select = four & 0x7777
            looked = [permute_bytes(low, high, select) for low, high in planes]
            if len(looked) == 2:
                words = [permute_bytes(looked[0], looked[1], Int32(s)) for s in (0x5140, 0x7362)]
                signs = [(four << 12 & 0x8000) | (four << 24 & -(1 << 31)) for four in (four, four >> 8)]
            else:
                pairs = [[permute_bytes(*looked[i : i + 2], Int32(s)) for i in (0, 2)] for s in (0x5140, 0x7362)]
                words = [permute_bytes(*pair, Int32(s)) for pair in pairs for s in (0x5410, 0x7632)]
                signs = [four << (28 - 4 * i) & -(1 << 31) for i in range(4)]
            found += [word ^ sign ^ negative for word, sign in zip(words, signs, strict=True)]
        return found

    def magnitudes(self, byte: Int32, gs: Any) -> list[Any]:
        """The numbers of codes 0 to 7, without the sign that an E4M3 scale may have."""
        scale = fp4.e4m3_values(byte & 0x7F)[0] if self.nvfp4 else fp4.ue8m0_value(byte)
        if gs is None:
            return [fp4.times(scale, Float32(m)) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
        half, three = (self.quotient(fp4.times(scale, Float32(m)), *gs) for m in (0.5, 1.5))
        by = lambda x, *powers: [fp4.times(x, Float32(p)) for p in powers]
        one, two, four = by(half, 2.0, 4.0, 8.0)
        six, twelve = by(three, 2.0, 4.0)
        return [fp4.times(scale, Float32(0)), half, one, three, two, six, four, twelve]

    @cute.jit
    def quotient(self, x: Float32, gs: Float32, inverse: Float32, ordinary: Any):
        """x / gs, correctly rounded. ``inverse`` is 1 / gs, so that the second of two corrections rounds as the
        quotient does (Markstein, 1990) where nothing leaves the range of normal numbers: ``ordinary`` says so."""
        q = fp4.times(x, inverse)
        if ordinary:
            for _ in cutlass.range_constexpr(2):
                q = fma(fma(-q, gs, x), inverse, q)
        else:
            q = fp4.divide(x, gs)
        return q

    def planes(self, numbers: list[Any], dtype: Any) -> list[tuple[Int32, Int32]]:
        """Byte i of all eight numbers, for every i, after rounding them to ``dtype``."""
        if dtype is Float32:
            bits = [x.bitcast(Int32) for x in numbers]
            planes = []
            for low, high in ((0x5140, 0x5410), (0x5140, 0x7632), (0x7362, 0x5410), (0x7362, 0x7632)):
                quads = []
                for q in (0, 4):
                    first, second = (permute_bytes(bits[q + i], bits[q + i + 1], Int32(low)) for i in (0, 2))
                    quads.append(permute_bytes(first, second, Int32(high)))
                planes.append((quads[0], quads[1]))
            return planes
        pairs = [pack(dtype, numbers[i], numbers[i + 1]) for i in range(0, 8, 2)]
        return [
            (permute_bytes(pairs[0], pairs[1], Int32(s)), permute_bytes(pairs[2], pairs[3], Int32(s)))
            for s in (0x6420, 0x7531)
        ]


def trace(
    arch: str,
    format: str,
    dtype: str,
    rank: int,
    groups: int,
    swizzled: bool,
    dense: bool,
    global_scale: bool,
    config: tuple[int, ...],
) -> tuple[Any, list[Any]]:
    """``groups`` is the number of batch axes after merging; ``dense``: 128x4 scales have no room between rows."""
    c = Config(*config)
    steps = (Int64(0),) * groups
    arguments = [
        fake.tensor("u8", (None,) * rank, align=c.width),
        fake.tensor("u8", (None,) * (2 if swizzled else rank), align=1),
        fake.tensor("f32", (), align=4) if global_scale else None,
        fake.tensor(dtype, (None,) * rank, align=16),
        Int32(0),
        (Int32(0), (Int64(0), Int32(0)), (Int32(0),) * groups, steps, steps, Int32(0), Int64(0)),
        fake.stream(),
    ]
    return _Dequantizer(format, swizzled, dense, c), arguments
