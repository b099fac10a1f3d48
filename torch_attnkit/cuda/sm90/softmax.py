"""The arithmetic between the two products of a prefill kernel, on the registers of one warpgroup.

An accumulator of 64 rows (``wgmma`` m64) gives lane ``l`` of warp ``w`` the rows ``16 w + l / 4`` and 8 below it, and
of every group of 8 columns the two from ``2 (l % 4)``. In register order: element ``a + 2 r + 4 v`` is column
``8 v + 2 (l % 4) + a`` of row ``r``. The A operand of the second product has the same order, so P needs no shuffle.

Scores stay unscaled; ``scale_log2`` (scale times log2 e) is folded into the exponential: ``p = 2^(s c - max c)``.
"""

import functools
import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.warp_ops import exp2


def pack(low: Float32, high: Float32, dtype: Any) -> Int32:
    """``warp_ops.pack``, for kernels that hold P themselves."""
    return op.pack(dtype, low, high)


def pack_into(words: cute.Tensor, acc: cute.Tensor, dtype: Any) -> None:
    """Round an accumulator into ``words``, a 32-bit view of an A operand or of output pairs."""
    for i in range(cute.size(words)):
        words[i] = op.pack(dtype, acc[2 * i], acc[2 * i + 1])


def cap(acc: cute.Tensor, slope: Float32) -> None:
    """Cap the scores, in place."""
    for i in range(cute.size(acc)):
        acc[i] = op.soft_cap(acc[i], slope)


class MaskBounds(NamedTuple):
    """Which columns two rows see, counted from this lane's first: those in [low, high) and sinks; None: no such limit.

    ``lows`` and ``highs`` hold one number per row; sinks are the columns in [sinks, sinks_end) below ``ends``.
    """

    lows: Any = None
    highs: Any = None
    sinks: Any = None
    sinks_end: Any = None
    ends: Any = None


def apply_mask(acc: cute.Tensor, bounds: MaskBounds) -> None:
    """-inf where the column is not one that the row sees."""
    for i in range(cute.size(acc)):
        column, row = Int32(i // 4 * 8 + i % 2), i // 2 % 2
        tests = []
        if bounds.lows is not None:
            tests.append(column >= bounds.lows[row])
        if bounds.highs is not None:
            tests.append(column < bounds.highs[row])
        seen = functools.reduce(operator.and_, tests) if tests else None
        if bounds.sinks_end is not None:
            sink = column < bounds.sinks_end
            if bounds.sinks is not None:
                sink &= column >= bounds.sinks
            seen = seen | sink
        if bounds.ends is not None:
            below = column < bounds.ends[row]
            seen = below if seen is None else seen & below
        acc[i] = cutlass.select_(seen, acc[i], -Float32.inf)


def peak(acc: cute.Tensor, r: int) -> Float32:
    """The maximum of row ``r``, in all four lanes that have a part of it."""
    elements = [i for i in range(cute.size(acc)) if i // 2 % 2 == r]
    peaks = [acc[i] for i in elements[:4]]
    for n, i in enumerate(elements[4:]):
        peaks[n % 4] = cute.arch.fmax(peaks[n % 4], acc[i])
    row_max = cute.arch.fmax(cute.arch.fmax(peaks[0], peaks[1]), cute.arch.fmax(peaks[2], peaks[3]))
    for distance in (1, 2):
        row_max = cute.arch.fmax(row_max, cute.arch.shuffle_sync_bfly(row_max, offset=distance))
    return row_max


def online(
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32,
    *,
    first: bool,
    exact: bool = False,
    p_scale_log2: float = 0.0,
) -> list:
    """Scores to probabilities in place, 2^lift times as large, with the row maxima and sums brought up to date.

    ``row_max`` holds unscaled maxima, ``row_sum`` this lane's part of the sums. Returns what each row's output so far
    must be multiplied by. A row that has seen nothing keeps -inf as its maximum and subtracts 0. ``exact`` is for sums
    that are results: it scales differences, one instruction more. What an fma with the rounded offset leaves, 2^-24 of
    a score, is in numerator and denominator alike.
    """
    scales = []
    for r in range(2):
        elements = [i for i in range(cute.size(acc)) if i // 2 % 2 == r]
        new = peak(acc, r)
        if not first:
            new = cute.arch.fmax(new, row_max[r])
        safe = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
        offset = p_scale_log2 - safe * scale_log2
        if not first:
            # Not an fma with the rounded offset: its residue would turn a factor of 1 into another, at every block.
            scales.append(exp2((row_max[r] - safe) * scale_log2))
        row_max[r] = new
        sums = [None, None]
        for n, i in enumerate(elements):
            power = (acc[i] - safe) * scale_log2 + p_scale_log2 if exact else op.fma(acc[i], scale_log2, offset)
            acc[i] = exp2(power)
            sums[n % 2] = acc[i] if sums[n % 2] is None else sums[n % 2] + acc[i]
        # A block's numbers are added up before they meet the sum of all: one rounding of the large sum, not one each.
        of_block = sums[0] + sums[1]
        row_sum[r] = of_block if first else op.fma(row_sum[r], scales[r], of_block)
    return scales


def rescale(acc: cute.Tensor, scales) -> None:
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * scales[i // 2 % 2]


def quad_sum(value: Float32) -> Float32:
    """The sum over the four lanes that share a row."""
    for distance in (1, 2):
        value += cute.arch.shuffle_sync_bfly(value, offset=distance)
    return value


def transpose_quads(words: list, lane: Int32) -> list:
    """Four 32-bit words per lane, exchanged among four lanes: word j of lane q becomes word q of lane j."""
    words = list(words)
    for step in (1, 2):
        upper = (lane & step) != 0
        for low in [j for j in range(4) if not j & step]:
            high = low | step
            sent = cutlass.select_(upper, words[low], words[high])
            got = cute.arch.shuffle_sync_bfly(sent, offset=step)
            words[low] = cutlass.select_(upper, got, words[low])
            words[high] = cutlass.select_(upper, words[high], got)
    return words
