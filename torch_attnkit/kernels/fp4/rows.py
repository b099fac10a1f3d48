"""Addresses of rows in device memory, and vector loads and stores."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from torch_attnkit.cuda import copies


def quotient(number: Int32, reciprocal: tuple) -> Int32:
    """number // d, for the reciprocal of d that the host made (``plan.reciprocal``): a product and a shift."""
    multiplier, shift = reciprocal
    return Int32((Int64(number) * multiplier) >> Int64(shift))


def offset(row: Int32, sizes: tuple, steps: tuple) -> Int64:
    """Elements before a row: its number in mixed radix, times the strides."""
    before = Int64(0)
    for size, step in zip(reversed(sizes[1:]), reversed(steps[1:]), strict=True):
        before += Int64(row % size) * step
        row = row // size
    return before + Int64(row) * steps[0]


def pieces(fragment: Any, count: int) -> list[Any]:
    """A fragment cut into fragments of ``count`` elements."""
    cut = cute.zipped_divide(fragment, (count,))
    return [cut[None, i] for i in range(cute.size(fragment) // count)]


def load(pointer: Any, vectors: list[Any]) -> None:
    """Vectors that lie one after the other."""
    for v, vector in enumerate(vectors):
        copies.load(pointer + v * cute.size(vector), vector)


def store_words(words: list[Any], pointer: Any) -> None:
    """32-bit words to bytes of device memory, aligned to all of them, at most 16 bytes."""
    target = cute.make_ptr(Int32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=4 * len(words))
    values = cute.make_rmem_tensor(len(words), Int32)
    for j, word in enumerate(words):
        values[j] = word
    copies.store(values, target)


def store_byte(byte: Int32, pointer: Any) -> None:
    cute.make_tensor(pointer, cute.make_layout(1))[0] = Uint8(byte)
