"""Operands of ``wgmma`` in shared memory, issue of a product, and where lanes have its accumulator.

Operands are rows of 128 bytes, in blocks of columns, with their 16-byte chunks swizzled (128B). Of a 64-row accumulator
a lane has two rows, 8 apart, and of every 8 columns two neighbours: element i is column ``i // 4 * 8 + i % 2`` from the
lane's first on.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from .warpgroup import KVRing


def keys_by_columns(ring: KVRing, address: Int32) -> cute.Tensor:
    """The ring as the right side of the first product: (N, part, stages * halves)."""
    return staged(ring.dtype, address, (ring.keys, ring.part, ring.stages * ring.halves))


def columns_by_keys(ring: KVRing, sKV: cute.Tensor) -> cute.Tensor:
    """The same as the right side of the second: (part, N, stages * halves)."""
    shape = (ring.part, ring.keys, ring.stages * ring.halves)
    return cute.composition(sKV, cute.make_ordered_layout(shape, order=(1, 0, 2)))


def staged(dtype: Any, address: Int32, shape: tuple[int, int, int]) -> cute.Tensor:
    """Rows of columns, a number of times, as ``wgmma`` reads them."""
    atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, shape[1])
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, dtype), shape, order=(0, 1, 2))
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, *, clear: bool) -> None:
    """Issue ``acc (+)= a b`` as one group of ``wgmma``, without waiting for it."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not clear)
    for k in range(cute.size(b, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def first_row(thread: Int32) -> Int32:
    """The first of the two rows of an accumulator that a lane has; the other is 8 below it."""
    return thread // 32 * 16 + (thread & 31) // 4


def lanes_sum(value: Float32) -> Float32:
    """Over the four lanes that have a row."""
    for distance in (1, 2):
        value += cute.arch.shuffle_sync_bfly(value, offset=distance)
    return value
