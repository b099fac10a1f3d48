"""Constants that both architectures are cut by."""

from __future__ import annotations

SPAN = 128  # elements of a row that a quad of lanes decodes at a time, 32 each: 16 bytes
STRADDLING = 0  # rows of scales follow each other, and every other one begins in the middle of a word
BULK_ROWS = -1  # the same, and those of a work tile come to shared memory by one copy or two
ALIGNMENT = {STRADDLING: 4, BULK_ROWS: 16}  # of scales, in bytes; otherwise that of a load
WARP_SLOTS = 64  # choices of experts at most that every block sorts for itself, by a warp
MOST_EXPERTS = 1 << 15  # whose counts one block keeps in shared memory
_LEAST_EXPERTS = 1 << 10


def experts_compiled(experts: int) -> int:
    """What a kernel is compiled for that has so many: a power of two, so that few are compiled."""
    return max(_LEAST_EXPERTS, 1 << (experts - 1).bit_length())
