"""Operands of the products as ``ldmatrix`` brings them: elements of 16 bits as they are, E4M3 as float16.

A step along a row is 32 bytes: 16 columns of 16 bits, or 32 of E4M3, which a lane converts exactly; nothing changes
lanes. The order in which columns enter a dot product is free, so a lane's four neighbouring bytes of a query or a key
are four columns of its own. Of V a lane has two neighbouring columns where it has two that are 8 apart of 16 bits, so
the output lies in that order until ``sort_columns``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from torch_attnkit.cuda.fp4 import permute_bytes
from torch_attnkit.cuda.fp4_weights import _halves_of_e4m3 as converted
from torch_attnkit.cuda.ring import Fixed

from .config import MmaConfig

Words = Any  # four registers, as ``ldmatrix`` or a product has them
_COLUMNS = 0x3120  # of (key 0, column 0), (0, 1), (1, 0), (1, 1): both keys of column 0, then of column 1


def elements(config: MmaConfig) -> Elements16 | ElementsFp8:
    return ElementsFp8(config) if config.fp8 else Elements16(config)


class Elements16(Fixed):
    blocks = 1  # of 16 columns, of a step

    def __init__(self, config: MmaConfig):
        self.dtype = config.dtype  # of the products

    def queries(self, words: Words) -> list[Words]:
        """Of each block the operand of 16 rows."""
        return [words]

    def keys(self, words: Words) -> list[Words]:
        """The same of 16 keys, those of the first 8 and of the last."""
        return [words]

    def values(self, words: Words) -> list[Words]:
        """The same of 16 keys' values, those of the first 8 columns and of the last."""
        return [words]

    def sort_columns(self, rO: cute.Tensor) -> None:
        """They are in order."""


class ElementsFp8(Fixed):
    blocks, dtype = 2, cutlass.Float16

    def __init__(self, config: MmaConfig):
        self.c = config

    def queries(self, words: Words) -> list[Words]:
        """``words``: rows 0 to 7 and 8 to 15 of 16 columns, then of the next."""
        return [
            (upper[0], lower[0], upper[1], lower[1])
            for upper, lower in ((converted(Uint32(words[i])), converted(Uint32(words[i + 1]))) for i in (0, 2))
        ]

    def keys(self, words: Words) -> list[Words]:
        """``words``: keys 0 to 7, of 16 columns and of the next, then keys 8 to 15."""
        return [(*converted(Uint32(words[i])), *converted(Uint32(words[i + 2]))) for i in (0, 1)]

    def values(self, words: Words) -> list[Words]:
        """``words``: keys 0 to 7 and 8 to 15 of 16 columns, then of the next."""
        blocks = []
        for i in (0, 2):
            first, last = (converted(Uint32(permute_bytes(words[j], words[j], Int32(_COLUMNS)))) for j in (i, i + 1))
            blocks.append((first[0], last[0], first[1], last[1]))
        return blocks

    def sort_columns(self, rO: cute.Tensor) -> None:
        """From even columns in a product's first 8 and odd ones in its last to a product's own order.

        Of 16 columns lane t of a quad has 4 t to 4 t + 3, and wants 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t: two each of
        lanes t / 2 and 2 + t / 2.
        """
        lane = cute.arch.lane_idx()
        quad, upper = lane // 4 * 4, lane % 2 != 0
        for block in range(self.c.dim_v // 16):
            for r in range(2):
                even, odd = 2 * r, 2 * r + 1  # registers of a lane's row
                own = [rO[even, 2 * block], rO[even, 2 * block + 1], rO[odd, 2 * block], rO[odd, 2 * block + 1]]
                for half in range(2):
                    owner = quad + half * 2 + lane % 4 // 2
                    four = [cute.arch.shuffle_sync(x, owner) for x in own]
                    for i in range(2):
                        rO[2 * r + i, 2 * block + half] = Float32(cutlass.select_(upper, four[2 + i], four[i]))
