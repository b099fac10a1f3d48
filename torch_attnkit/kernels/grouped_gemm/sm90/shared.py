"""A block's shared memory: a ring of stages, each of weights, factors and tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8
from cutlass.cute.nvgpu import cpasync

from torch_attnkit.cuda import copies
from torch_attnkit.cuda.ring import Fixed

from .arguments import Flags, Matrices
from .config import BOX, WARPS, Config

ROW_BYTES = BOX // 2  # of weights in a box, in chunks of 16 bytes that TMA swizzles within 8 rows


class Loads(NamedTuple):
    """The codes for TMA."""

    atom: cute.CopyAtom
    rows: cute.Tensor  # (rows, bytes, E); rows of gate and up as (8, 2, M / 8)


class Shared(Fixed):
    """Addresses in shared memory, and the ring's weights for TMA. Stages of both products are of the same sizes; what
    is ``config``'s alone is what the first of them needs beside its stages."""

    def __init__(self, config: Config, memory: Any):
        self.c = config
        self.sW = memory.allocate_tensor(Uint8, self._boxes(config), 1024, swizzle=cute.make_swizzle(3, 4, 3))
        self._tokens = memory.allocate(config.stages * config.token_bytes, 128).toint()
        self._factors = memory.allocate(config.stages * config.factor_bytes, 128).toint()
        self.sums = memory.allocate(config.sum_bytes, 128).toint() if config.sum_bytes else Int32(0)
        self.results = memory.allocate(config.result_bytes, 128).toint() if config.result_bytes else Int32(0)

    def _boxes(self, config: Config) -> cute.Layout:
        boxes = cute.make_layout(self.c.stages * config.boxes, stride=config.rows * ROW_BYTES)
        return cute.append(box_layout(config), boxes)

    def boxes(self, config: Config) -> cute.Tensor:
        """(rows, bytes, boxes) as a product's rows are."""
        return cute.make_tensor(self.sW.iterator, self._boxes(config))

    def weights(self, stage: Int32) -> Int32:
        """(slice, row, chunk) of 16 bytes."""
        return self.sW.iterator.toint() + stage * self.c.weight_bytes

    def tokens(self, stage: Int32) -> Int32:
        """(token, part) of a row each, with ``_PAD`` bytes behind it."""
        return self._tokens + stage * self.c.token_bytes

    def clear_tokens(self) -> None:
        """Rows of tokens that a work tile does not have are read, and must not be left to chance."""
        clear(self._tokens, self.c.stages * self.c.token_bytes)

    def factors(self, stage: Int32) -> Int32:
        """(span, row, quad) of one or two bf16."""
        return self._factors + stage * self.c.factor_bytes


@cute.jit
def clear(address: Int32, size: cutlass.Constexpr):
    """All threads: zeros where copies will come."""
    for at in cutlass.range(cute.arch.thread_idx()[0] * 16, size, 32 * WARPS * 16, unroll=1):
        copies.store_words(address + at, [Int32(0)] * 4, cute.AddressSpace.smem)
    cute.arch.fence_view_async_shared()


def box_rows(config: Config) -> Any:
    """Rows of a box; those of gate and up as (8, 2, groups of 8)."""
    return (8, 2, config.row_warps) if config.paired else config.rows


def box_layout(config: Config) -> cute.Layout:
    """(rows, bytes) of a box."""
    steps = (ROW_BYTES, 8 * ROW_BYTES, 16 * ROW_BYTES) if config.paired else ROW_BYTES
    return cute.make_layout((box_rows(config), ROW_BYTES), stride=(steps, 1))


def loads(config: Config, flags: Flags, weights: Matrices) -> Loads:
    """The codes of a product."""
    codes = weights.codes
    experts, rows, nbytes = codes.shape
    expert_step, row_step, _ = codes.stride
    if config.paired:
        # Steps from a gate row to the next, from it to its up row, and between groups of 8.
        turns = flags.interleaved != 0
        next_row = cutlass.select_(turns, 2 * row_step, row_step)
        up = cutlass.select_(turns, row_step, rows // 2 * row_step)
        steps = [cute.assume(s, divby=16) for s in (next_row, up, 8 * next_row)]
        layout = cute.make_layout(((8, 2, rows // 16), nbytes, experts), stride=(tuple(steps), 1, expert_step))
    else:
        layout = cute.make_layout((rows, nbytes, experts), stride=(row_step, 1, expert_step))
    tile = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box_layout(config))
    tensor = cute.make_tensor(codes.iterator, layout)
    op = cpasync.CopyBulkTensorTileG2SOp()
    return Loads(*cpasync.make_tiled_tma_atom(op, tensor, tile, (box_rows(config), ROW_BYTES)))
