"""FP4 activations dequantised to bf16, in the K order of weights (``grouped_gemm/permute_k.py``).

Codes times scales have at most six significant bits, so bf16 holds them, whatever their exponents.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies, fake, fp4
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.fp4_weights import decode
from torch_attnkit.cuda.ring import Fixed

from ...grouped_gemm.arguments import Matrices
from ...grouped_gemm.problem import BLOCK, SPAN
from ...grouped_gemm.sm90.permute import Spans

_TWO_TO_126 = 0x7E807E80  # in bf16, twice: by which codes become their values
_EACH = 32  # elements of a row that a lane has


@dsl_user_op
def _multiply(a: Uint32, b: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two products of bf16, rounded to nearest."""
    return asm(Uint32, [a, b], "mul.rn.bf16x2 $0, $1, $2;", loc=loc, ip=ip)


class Fp4Activations(Fixed):
    """``alignment``: bytes of packed elements of which all or none exist."""

    def __init__(self, format: str, swizzled: bool, alignment: int):
        self.format, self.swizzled, self.alignment = format, swizzled, alignment
        self.block, self.spans = BLOCK[format], Spans(None, _EACH)

    @cute.jit
    def words(
        self, mO: cute.Tensor, mScale: cute.Tensor, group: Int32, token: Int32, span: Int32,
        inside: cutlass.Boolean, quarter: Int32,
    ):  # fmt: skip
        """A lane's part of a permuted span, 16 bytes of every 64; zeros unless ``inside``, and behind K. All lanes of
        a quad call."""
        return self.permuted(*self.read(mO, mScale, group, token, span, inside, quarter), quarter)

    @cute.jit
    def read(
        self, mO: cute.Tensor, mScale: cute.Tensor, group: Int32, token: Int32, span: Int32,
        inside: cutlass.Boolean, quarter: Int32,
    ):  # fmt: skip
        """A lane's packed elements of a span, and their scales' bytes.

        ``mO``: (T, G, K/2); ``mScale``: (G, T, blocks), or each group's in the 128x4 layout."""
        nbytes = Int32(mO.shape[2])
        at = span * (SPAN // 2) + quarter * (_EACH // 2)
        row = mO.iterator.toint() + Int64(token) * mO.stride[0] + Int64(group) * mO.stride[1]
        rPacked = cute.make_rmem_tensor(_EACH // 8, Uint32)
        rPacked.fill(0)
        for first in cutlass.range_constexpr(0, _EACH // 2, self.alignment):
            if inside & (at + first < nbytes):
                pointer = cute.make_ptr(Uint32, row + at + first, cute.AddressSpace.gmem, assumed_align=self.alignment)
                some = cute.make_tensor(rPacked.iterator + first // 4, cute.make_layout(self.alignment // 4))
                copies.load(pointer, some)
        block = at * 2 // self.block
        scales = []
        for i in cutlass.range_constexpr(_EACH // self.block):
            byte = Int32(0)
            if inside & (block + i < nbytes * 2 // self.block):
                byte = self.scale(mScale, group, token, block + i)
            scales.append(byte)
        return rPacked, scales

    def permuted(self, rPacked: cute.Tensor, scales: list[Int32], quarter: Int32) -> list[list[Int32]]:
        """What ``read`` gave as bf16, in the order of decoding."""
        values = [fp4.e4m3_values(s)[0] if self.format == "nvfp4" else fp4.ue8m0_value(s) for s in scales]
        pairs = [Uint32(op.pack(BFloat16, x, x)) for x in values]
        words = []
        for w in range(_EACH // 8):
            for pair in decode(rPacked[w], Uint32(_TWO_TO_126)):
                words.append(Int32(_multiply(pair, pairs[w * 8 // self.block])))
        return self.spans.transpose_quad(words, quarter)

    def scale(self, mScale: cute.Tensor, group: Int32, row: Int32, block: Int32) -> Int32:
        """A scale's byte."""
        at = mScale.iterator.toint() + Int64(group) * mScale.stride[0]
        if self.swizzled:
            tile = Int64(row // 128) * 128 * mScale.shape[2] + block // 4 * 512
            at += tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        else:
            at += Int64(row) * mScale.stride[1] + block
        # A byte is extended without sign only to an unsigned number.
        return Int32(Uint32(copies.scalar(cute.make_ptr(Uint8, at, cute.AddressSpace.gmem, assumed_align=1))))


def fake_operands(o_alignment: int, code_alignment: int) -> list[Any]:
    """o, its scales, both global scales, and the weights."""
    one = fake.tensor("f32", (1,), (1,), align=4)
    unused = [fake.tensor("f32", (None,) * axes, align=4) for axes in (2, 1, 1)]
    weights = Matrices(_packed(code_alignment), _bytes(), *unused)
    return [_packed(o_alignment), _bytes(), one, one, weights]


def _packed(alignment: int) -> Any:
    a = alignment
    return fake.tensor("u8", (fake.dim(), fake.dim(), fake.dim(a)), (fake.dim(a), fake.dim(a), 1), align=a)


def _bytes() -> Any:
    return fake.tensor("u8", (None, None, None), align=1)
