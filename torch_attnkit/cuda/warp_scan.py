"""Sums over the lanes of a warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

_STEPS = 5  # 2^5 lanes


def total(number: Int32) -> Int32:
    """Of all lanes."""
    for step in range(_STEPS):
        number += cute.arch.shuffle_sync_bfly(number, 1 << step)
    return number


def most(number: Int32) -> Int32:
    """The largest of all lanes."""
    for step in range(_STEPS):
        number = cutlass.max(number, cute.arch.shuffle_sync_bfly(number, 1 << step))
    return number


def up_to_lane(number: Int32) -> Int32:
    """Of this lane and those before it."""
    for step in range(_STEPS):
        before = cute.arch.shuffle_sync_up(number, 1 << step)
        number += cutlass.select_(cute.arch.lane_idx() >= 1 << step, before, Int32(0))
    return number
