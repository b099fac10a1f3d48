"""Which keys the rows of a work tile see: by comparisons, where the rules are fixed at compile time, or by bits."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from torch_attnkit.cuda.ring import Fixed
from torch_attnkit.cuda.sm90 import softmax

from ..key_blocks import MaskedKeys, Sequence, masked_keys
from .config import Config


class Mask(Protocol):
    def apply(self, rS: cute.Tensor, block: Int32, edge: str) -> None:
        """Cap the scores, then give -inf to those of keys that a row must not see.

        ``edge`` says which edges of what is seen may cross the block: "both", or "left" where the right one cannot.
        """

    def masked_keys(self) -> MaskedKeys:
        """The keys at which no row looks."""


@dataclass
class BoundsMask(Fixed):
    """Of rows that are queries of one head, with the features that the kernel was compiled with."""

    w: Any  # the consumer
    c: Config
    seq: Sequence
    position: Int32  # of the tile's first row in its sequence

    def apply(self, rS: cute.Tensor, block: Int32, edge: str) -> None:
        w, c = self.w, self.c
        if const_expr(c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        origin = block * c.tile_n + w.lane % 4 * 2  # the key of this lane's first column
        rows = [self.position + w.row, self.position + w.row + 8]
        start, end = self.seq.start - origin, self.seq.end - origin
        lows = highs = sinks_end = ends = None
        if const_expr(edge == "both"):
            ends = [end, end]
            if const_expr(c.causal):
                ends = [cutlass.min(end, p + 1 - origin) for p in rows]
        if const_expr(c.window):
            lows = [cutlass.max(start, p - w.scalars.window + 1 - origin) for p in rows]
            if const_expr(edge == "both" and not c.causal):
                highs = [p + w.scalars.window - origin for p in rows]
            if const_expr(c.sink_tokens):
                sinks_end = cutlass.min(start + w.scalars.sink_tokens, end)
        elif const_expr(c.kv_start):
            lows = [start, start]
        softmax.apply_mask(rS, softmax.MaskBounds(lows, highs, start if c.kv_start else None, sinks_end, ends))

    def masked_keys(self) -> MaskedKeys:
        return masked_keys(self.c, self.seq, self.w.scalars)


class MaskRules(NamedTuple):
    """What decides which keys a query sees, beside its sequence."""

    causal: Int32  # 0 or 1
    window: Int32  # more than every length: none
    sink_tokens: Int32

    @classmethod
    def of(cls, scalars: Any) -> "MaskRules":
        return cls(scalars.causal, scalars.window, scalars.sink_tokens)


class RowBounds(NamedTuple):
    """The keys of a lane's two rows: [lows, highs), and sink tokens from ``start`` to ``sinks_ends``."""

    lows: tuple
    highs: tuple
    start: Int32
    sinks_ends: tuple


def row_bounds(seq: Sequence, positions: tuple, rules: MaskRules) -> RowBounds:
    causal = rules.causal != 0
    ends = [cutlass.select_(causal, cutlass.min(seq.end, p + 1), seq.end) for p in positions]
    return RowBounds(
        lows=tuple(cutlass.max(seq.start, p - rules.window + 1) for p in positions),
        highs=tuple(
            cutlass.min(e, cutlass.select_(causal, e, p + rules.window)) for e, p in zip(ends, positions, strict=True)
        ),
        start=seq.start,
        sinks_ends=tuple(cutlass.min(seq.start + rules.sink_tokens, e) for e in ends),
    )


def _bits_below(column: Int32, columns: int) -> Int32:
    """A bit for each of a lane's columns of a block, 0, 1, 8, 9, 16 ..., those below ``column`` being set."""
    inside = cutlass.max(cutlass.min(column, columns), Int32(0))
    one = Int32(1) if columns < 128 else Int64(1)  # of 128 columns all 32 bits may be set
    return Int32((one << (inside // 8 * 2 + cutlass.min(inside % 8, 2))) - 1)


@dataclass
class BitMask(Fixed):
    """Of rows of a KV head's query heads: the bounds of a lane's two rows are numbers that the call brings.

    Ranges of keys are bits, a word for each of a lane's rows: comparisons of every column need more registers than an
    output and a block's scores leave.
    """

    w: Any  # the consumer
    c: Config
    seq: Sequence
    bounds: RowBounds

    def apply(self, rS: cute.Tensor, block: Int32, edge: str) -> None:
        w, s, c = self.w, self.bounds, self.c
        if const_expr(c.softcap):
            softmax.cap(rS, w.scalars.cap_slope)
        origin = block * c.tile_n + w.lane % 4 * 2  # the key of this lane's first column
        below = lambda key: _bits_below(key - origin, c.tile_n)
        for r in range(2):
            seen = below(s.highs[r])
            if const_expr(c.window or c.kv_start):
                seen &= ~below(s.lows[r])
            if const_expr(c.sink_tokens):
                seen |= below(s.sinks_ends[r]) & ~below(s.start)
            for i in range(cute.size(rS)):
                if i // 2 % 2 == r:
                    bit = 1 << (i // 4 * 2 + i % 2)
                    bit = bit if bit < 1 << 31 else bit - (1 << 32)
                    rS[i] = cutlass.select_((seen & bit) != 0, rS[i], -Float32.inf)

    def masked_keys(self) -> MaskedKeys:
        return masked_keys(self.c, self.seq, self.w.scalars)
