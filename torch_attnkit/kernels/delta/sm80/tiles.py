"""Numbers in shared memory by address, and tiles of 16 rows as operands of mma.m16n8k16."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_attnkit.cuda import warp_ops as op


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
