"""E4M3 in shared memory to elements of products of 16 bits, exactly.

    (N, D) bytes as TMA leaves them -> 8 bytes a lane at a time -> (N, D) elements as products take them

Widened, columns lie in runs of 128 or 64 bytes, one run of all rows after another, chunks of 16 bytes swizzled by rows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Uint32, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.fp4 import floats
from torch_attnkit.cuda.fp4_weights import _halves_of_e4m3 as converted
from torch_attnkit.cuda.word_ops import load_words

_LANES = 32
_BYTES, _CHUNK = 8, 16  # of a lane at a time, as they come and widened
_AHEAD = 4  # loads of a lane in flight


@cute.jit
def widen(
    source: Int32, target: Int32, rows: cutlass.Constexpr, dim: cutlass.Constexpr, dtype: cutlass.Constexpr,
    warp: Int32, warps: cutlass.Constexpr,
):  # fmt: skip
    """A warp's part, of ``warps``, of (rows, dim) at two addresses, bytes and ``dtype``.

    Lanes that store at once have a run of a row, and those that load at once two, where there are as many, or two rows:
    neither meets in a bank.
    """
    columns = const_expr(64 if dim % 64 == 0 else 32)  # of a run
    chunks, runs = const_expr(columns // _BYTES), const_expr(dim // columns)
    concurrent = const_expr(2 if runs % 2 == 0 else 1)  # runs
    row_step = const_expr(_LANES // (chunks * concurrent))
    groups, run_bytes = const_expr(rows // row_step), const_expr(2 * columns)
    lane = cute.arch.lane_idx()
    chunk, run, row = lane % chunks, lane // chunks % concurrent, lane // (chunks * concurrent)
    row += warp * row_step  # of the warp's first group
    from_ = source + row * dim + run * columns + chunk * _BYTES
    begin = target + run * (rows * run_bytes) + row * run_bytes
    step = const_expr(warps * row_step)  # rows from group to group
    # Of the n-th group the row modulo 8, by which chunks are swizzled, is one of these.
    period = const_expr(next(p for p in (1, 2, 4) if p * step % 8 == 0))
    targets = [begin + _swizzled(chunk, row + i * step, chunks) * _CHUNK for i in range(period)]
    last = groups // warps * warps + warp  # a group that not every warp may have
    todo = [(k, of) for of in range(0, runs, concurrent) for k in range(-(-groups // warps))]
    for first in cutlass.range_constexpr(0, len(todo), _AHEAD):
        some = const_expr(todo[first : first + _AHEAD])
        loaded = []
        for k, of in some:
            at = k if (k + 1) * warps <= groups else cutlass.select_(last < groups, Int32(k), Int32(0))
            loaded.append(load_words(2, from_ + (at * step * dim + of * columns)))
        for (k, of), words in zip(some, loaded, strict=True):
            found = _widened(words, dtype)
            to = targets[k % period] + (of * rows + k * step) * run_bytes
            if const_expr((k + 1) * warps <= groups):
                copies.store_words(to, found, cute.AddressSpace.smem)
            else:
                if last < groups:
                    copies.store_words(to, found, cute.AddressSpace.smem)


@cute.jit
def widen_rows(
    source: Int32, target: Int32, rows: cutlass.Constexpr, dim: cutlass.Constexpr, pitches: cutlass.Constexpr,
    dtype: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr,
):  # fmt: skip
    """A thread's part of (rows, dim) at two addresses, bytes and ``dtype``, whose rows are ``pitches`` bytes apart."""
    chunks = const_expr(dim // _BYTES)
    last, whole = const_expr(rows * chunks - 1), const_expr(rows * chunks % threads == 0)
    all_of = [thread + n * threads for n in range(-(-rows * chunks // threads))]
    for first in cutlass.range_constexpr(0, len(all_of), _AHEAD):
        some = all_of[first : first + _AHEAD]
        held = some if whole else [cutlass.min(i, last) for i in some]
        loaded = [load_words(2, source + i // chunks * pitches[0] + i % chunks * _BYTES) for i in held]
        for i, words in zip(some, loaded, strict=True):
            to = target + i // chunks * pitches[1] + i % chunks * _CHUNK
            if const_expr(whole):
                copies.store_words(to, _widened(words, dtype), cute.AddressSpace.smem)
            else:
                if i <= last:
                    copies.store_words(to, _widened(words, dtype), cute.AddressSpace.smem)


def _widened(words: tuple, dtype: Any) -> list[Int32]:
    """Eight numbers of E4M3 as pairs of ``dtype``."""
    return [_of_f16(Int32(pair), dtype) for word in words for pair in converted(Uint32(word))]


def _swizzled(chunk: Int32, row: Int32, chunks: int) -> Int32:
    return chunk ^ (row % 8 if chunks == 8 else row // 2 % 4)


def _of_f16(pair: Int32, dtype: Any) -> Int32:
    """Two numbers of E4M3 in float16 in another type."""
    return pair if dtype == Float16 else Int32(op.pack(dtype, *floats(Float16, pair)))
