"""The row of a warp, its slot, and bytes between registers and device memory in pieces."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr

from torch_attnkit.cuda import copies
from torch_attnkit.kernels.fp4.rows import pieces


@cute.jit
def of_warp(mSlot: cute.Tensor, mCache: cute.Tensor, warps: int):
    """This warp's row, whether there is one, its slot, and whether that is a row of the cache."""
    block, _, _ = cute.arch.block_idx()
    row = Int64(block) * warps + cute.arch.warp_idx()
    inside = row < mSlot.shape[0]
    slot = Int64(-1)
    if inside:
        slot = Int64(copies.scalar(mSlot.iterator + row))
    return row, inside, slot, (slot >= 0) & (slot < mCache.shape[0])


def blocks(mSlot: cute.Tensor, warps: int) -> Any:
    """The CTAs of a launch, with a row for each of their ``warps``."""
    return (mSlot.shape[0] + (warps - 1)) // warps


def zeros(count: int, dtype: Any) -> Any:
    fragment = cute.make_rmem_tensor(count, dtype)
    fragment.fill(0)
    return fragment


def words_of(fragment: Any) -> list[Any]:
    """The 32-bit words of a fragment."""
    words = cute.recast_tensor(fragment, Int32)
    return [words[i] for i in range(cute.size(words))]


def fragment_of(words: list[Any], dtype: Any = Uint8) -> Any:
    """32-bit words as a fragment of another dtype."""
    held = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        held[i] = word
    return cute.recast_tensor(held, dtype)


@cute.jit
def load(pointer: Any, fragment: Any, count: int, first: Int32, end: int):
    """What lies ``first`` elements behind a pointer, ``count`` at once, as far as it is before ``end``."""
    whole = const_expr(end % cute.size(fragment) == 0)  # so that no fragment is there in part
    if first < end:
        for i, piece in enumerate(pieces(fragment, count)):
            if whole or first + i * count < end:
                copies.load(pointer + (first + i * count), piece)


@cute.jit
def store(fragment: Any, pointer: Any, count: int, first: Int32, end: int):
    """The same the other way round."""
    whole = const_expr(end % cute.size(fragment) == 0)
    if first < end:
        for i, piece in enumerate(pieces(fragment, count)):
            if whole or first + i * count < end:
                copies.store(piece, pointer + (first + i * count))
