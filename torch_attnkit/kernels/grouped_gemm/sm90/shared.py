"""A block's shared memory: a ring of stages, each of weights, factors and tokens. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint8

from torch_attnkit.cuda.ring import Fixed

from .config import BOX, Config

ROW_BYTES = BOX // 2  # of weights in a box, in chunks of 16 bytes that TMA swizzles within 8 rows


class Shared(Fixed):
    """Addresses in shared memory, and the ring's weights for TMA."""

    def __init__(self, config: Config, memory: Any):
        self.c = config
        box = box_layout(config)
        boxes = cute.make_layout(config.stages * config.slices, stride=config.rows * ROW_BYTES)
        self.sW = memory.allocate_tensor(
            Uint8, cute.append(box, boxes), 1024, swizzle=cute.make_swizzle(3, 4, 3)
        )  # (rows, bytes, boxes)
        self._tokens = memory.allocate(config.stages * config.token_bytes, 128).toint()
        self._factors = memory.allocate(config.stages * config.factor_bytes, 128).toint()
        self.sums = memory.allocate(config.sum_bytes, 128).toint() if config.sum_bytes else Int32(0)
        self.last = memory.allocate(4 * config.columns, 16).toint()  # a word for each token of a work tile

    def weights(self, stage: Int32) -> Int32:
        """(slice, row, chunk) of 16 bytes."""
        return self.sW.iterator.toint() + stage * self.c.weight_bytes

    def tokens(self, stage: Int32) -> Int32:
        """(part, span, chunk, 8 tokens, lane) of 16 bytes."""
        return self._tokens + stage * self.c.token_bytes

    def factors(self, stage: Int32) -> Int32:
        """(span, row, quad) of one or two bf16."""
        return self._factors + stage * self.c.factor_bytes


def box_rows(config: Config) -> Any:
    """Rows of a box; those of gate and up as (8, 2, groups of 8)."""
    return (8, 2, config.row_warps) if config.paired else config.rows


def box_layout(config: Config) -> cute.Layout:
    """(rows, bytes) of a box."""
    steps = (ROW_BYTES, 8 * ROW_BYTES, 16 * ROW_BYTES) if config.paired else ROW_BYTES
    return cute.make_layout((box_rows(config), ROW_BYTES), stride=(steps, 1))
