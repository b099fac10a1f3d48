"""Numbers and tiles in shared memory, and products by mma.m16n8k16 whose rows are 16 rows of V."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from torch_attnkit.cuda import warp_ops as op

from .config import TOKENS, Config

GROUPS = TOKENS // 8  # of tokens: columns of one product


def elements(dtype: Any, address: Int32, count: int, align: int = 0) -> cute.Tensor:
    """``count`` numbers at an address that is a multiple of ``align``, by default of their size."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align or dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load_floats(address: Int32, count: int) -> cute.Tensor:
    """2 or 4 aligned floats in registers."""
    found = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(elements(Float32, address, count, 4 * count), found)
    return found


def tile_address(pitch: int, paired: bool = False) -> Int32:
    """What this lane adds to the address of a tile of 16 x 16 for ``ldmatrix_x4``. Its tiles of 8 x 8 come as rows 0
    and 8 of columns 0, then of columns 8: operand A. ``paired``: as columns 0 and 8 of rows 0, then of rows 8, so that
    two neighbouring registers are operand B with rows as columns. Of a transposed load the former are operand B."""
    lane = cute.arch.lane_idx()
    if paired:
        return (lane % 8 + lane // 16 * 8) * pitch + lane // 8 % 2 * 16
    return lane % 16 * pitch + lane // 16 * 16


def load_tile(address: Int32, transposed: bool = False) -> tuple[Int32, ...]:
    return op.ldmatrix_x4(address, transposed=transposed)


def columns(tile: tuple[Int32, ...], half: int) -> tuple[Int32, Int32]:
    """Operand B, 16 x 8, of the two in a tile."""
    return tile[2 * half], tile[2 * half + 1]


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
