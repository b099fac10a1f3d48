"""Rows of a matrix in device memory that TMA gathers by their numbers: ``cp.async.bulk.tensor`` with ``tile::gather4``.

A copy brings some columns of four rows, wherever these are; of a number that no row has, zeros. Imports cutlass.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync


def atom(rows: cute.Tensor, layout: Any, box: tuple[int, int], group: Any) -> tuple[Any, cute.Tensor]:
    """TMA of a box of ``rows`` (R, D) that shared memory holds as ``layout`` says: the atom, and the tensor of
    coordinates that goes with it.

    A box is a multiple of four rows by some columns. ``group`` is whose barriers count the bytes, as of all copies.
    """
    by_row = cute.make_layout((rows.shape[0], rows.shape[1]), stride=(1, 0))
    numbers = cute.make_tensor(cute.make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=4), by_row)
    copy = cpasync.CopyBulkTensor2DGather4G2SOp(group)
    made = cpasync.make_tiled_tma_atom(copy, rows, layout, box, gmem_coord_tensor=numbers)
    return made[0], made[1]


def load(
    atom: Any, coordinates: cute.Tensor, numbers: list[Int32], column: Int32, target: cute.Tensor, full: cute.Pointer
) -> None:
    """The box of columns number ``column`` of the rows ``numbers``, into ``target`` (rows, columns). A whole warp calls
    this, with the same arguments; the barrier ``full`` counts the bytes."""
    box = (cute.size(target, mode=[0]), cute.size(target, mode=[1]))
    source = cute.group_modes(cute.local_tile(coordinates, box, (None, column)), 0, 2)  # (box, R / rows of a box)
    wanted = cute.make_rmem_tensor(cute.make_layout((box, 1), stride=((1, 0), 0)), Int32)
    for i, number in enumerate(numbers):
        wanted[i] = number
    grouped = cute.append(cute.group_modes(target, 0, 2).layout, cute.make_layout(1, stride=0))  # (box, 1)
    to, columns, rows = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.make_tensor(target.iterator, grouped), [source, wanted]
    )
    cute.copy(atom, [columns[None, 0], rows[None, 0]], to[None, 0], tma_bar_ptr=full)
