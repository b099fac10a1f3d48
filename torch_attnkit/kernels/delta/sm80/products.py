"""Products by mma.m16n8k16 whose rows are 16 rows of V, and what stands between them."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from torch_attnkit.cuda import warp_ops as op

from .config import TOKENS, Config
from .tiles import columns, load_floats, load_tile, tile_address

GROUPS = TOKENS // 8  # of tokens: columns of one product


def zeros(groups: int = GROUPS) -> cute.Tensor:
    """Sums of 16 rows and 8 columns a group: four a lane."""
    sums = cute.make_rmem_tensor((4, groups), Float32)
    sums.fill(0.0)
    return sums


def add(dtype: Any, sums: cute.Tensor, i: int, a: Any, b: Any) -> None:
    """Add a product of operands A and B to group ``i``."""
    new = op.mma_m16n8k16(dtype, a, b, [sums[x, i] for x in range(4)])
    for x in range(4):
        sums[x, i] = new[x]


def operand(sums: cute.Tensor, dtype: Any) -> list[list[Int32]]:
    """Results of products (16 rows, columns) as operands A of 16 columns each."""
    groups = cute.size(sums) // 4
    return [
        [op.pack(dtype, sums[2 * r, 2 * m + t], sums[2 * r + 1, 2 * m + t]) for t in range(2) for r in range(2)]
        for m in range(groups // 2)
    ]


def times_tokens(c: Config, dtype: Any, operands: list[list[Int32]], address: Int32) -> cute.Tensor:
    """``operands`` (16, K) times the rows of K numbers at ``address``, transposed: (16, tokens)."""
    sums, at = zeros(), address + tile_address(c.key_pitch, paired=True)
    for step in range(c.dims[0] // 16):
        for m in range(TOKENS // 16):
            tile = load_tile(at + m * 16 * c.key_pitch + step * 32)
            for half in range(2):
                add(dtype, sums, 2 * m + half, operands[step], columns(tile, half))
    return sums


def add_lower(c: Config, sums: cute.Tensor, operands: list[list[Int32]], address: Int32, by_columns: bool) -> None:
    """Add ``operands`` (16, tokens) times a lower triangle in float16, transposed. ``by_columns``: columns of the
    triangle, not rows, lie in shared memory one after another."""
    at = address + tile_address(c.square_pitch, paired=not by_columns)
    for m, step in ((0, 0), (1, 0), (1, 1)):  # 16 rows and 16 columns of it
        row, column = (step, m) if by_columns else (m, step)
        tile = load_tile(at + row * 16 * c.square_pitch + column * 32, transposed=by_columns)
        for half in range(2):
            add(Float16, sums, 2 * m + half, operands[step], columns(tile, half))


def scale_tokens(c: Config, sums: cute.Tensor, stage: Int32, factor: int) -> None:
    """Multiply by a factor of each token, which the Gram warp left in ``stage``."""
    at = c.factors.at(stage) + 4 * (factor * TOKENS + cute.arch.lane_idx() % 4 * 2)
    for n in range(GROUPS):
        by = load_floats(at + 32 * n, 2)
        for r in range(4):
            sums[r, n] *= by[r % 2]
