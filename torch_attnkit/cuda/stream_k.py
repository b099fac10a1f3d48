"""Stream-K decomposition: units of work cut into equal runs, one a CTA, wherever the cuts fall."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32


def quotient(a: Int32, b: Int32 | int) -> Int32:
    """``a // b`` of numbers that are not negative: unsigned, half the instructions of a signed floor division."""
    return a if isinstance(b, int) and b == 1 else Int32(Uint32(a) // Uint32(b))


class Partition(NamedTuple):
    """``total`` units of work in ``blocks`` equal runs: CTA i starts at i * total / blocks, rounded down."""

    total: Int32
    blocks: Int32
    each: Int32  # total / blocks, rounded down
    extra: Int32  # and what is left

    def start(self, block: Int32) -> Int32:
        return block * self.each + quotient(block * self.extra, self.blocks)

    def owner(self, unit: Int32) -> Int32:
        """The CTA that has a unit: a float estimate, off by one at most, corrected."""
        block = Int32(cutlass.Float32(unit) * (cutlass.Float32(self.blocks) / cutlass.Float32(self.total)))
        for _ in range(2):
            block -= cutlass.select_(self.start(block) > unit, Int32(1), Int32(0))
        for _ in range(2):
            block += cutlass.select_(self.start(block + 1) <= unit, Int32(1), Int32(0))
        return block
