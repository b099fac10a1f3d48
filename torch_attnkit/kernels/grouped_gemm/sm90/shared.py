"""A block's shared memory: a ring of stages, each of weights, factors and tokens. Imports cutlass."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint8

from torch_attnkit.cuda.ring import Fixed

from .config import ROWS, STAGE, Config

ROW_BYTES = STAGE // 2  # of weights in a stage, in chunks of 16 bytes that TMA swizzles within 8 rows


class Shared(Fixed):
    """Addresses in shared memory, and the ring's weights for TMA."""

    def __init__(self, config: Config, memory: Any):
        self.c = config
        box = box_layout(config.paired)
        stages = cute.make_layout(config.stages, stride=config.weight_bytes)
        self.sW = memory.allocate_tensor(
            Uint8, cute.append(box, stages), 1024, swizzle=cute.make_swizzle(3, 4, 3)
        )  # (rows, bytes, stages)
        self._tokens = memory.allocate(config.stages * config.token_bytes, 128).toint()
        self._factors = memory.allocate(config.stages * config.factor_bytes, 128).toint()

    def weights(self, stage: Int32) -> Int32:
        return self.sW.iterator.toint() + stage * self.c.weight_bytes

    def tokens(self, stage: Int32) -> Int32:
        """(part, span, chunk, 8 tokens, lane) of 16 bytes."""
        return self._tokens + stage * self.c.token_bytes

    def factors(self, stage: Int32) -> Int32:
        """(span, row, quad) of one or two bf16."""
        return self._factors + stage * self.c.factor_bytes


def box_layout(paired: bool) -> cute.Layout:
    """(rows, bytes) of a stage; rows of gate and up as (8, 2, 8)."""
    if paired:
        return cute.make_layout(
            ((8, 2, ROWS // 16), ROW_BYTES), stride=((ROW_BYTES, 8 * ROW_BYTES, 16 * ROW_BYTES), 1)
        )
    return cute.make_layout((ROWS, ROW_BYTES), stride=(ROW_BYTES, 1))
