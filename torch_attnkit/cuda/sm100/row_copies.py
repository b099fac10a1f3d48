"""Rows of a matrix in device memory that TMA brings to shared memory: neighbours, or any four.

A row comes in blocks of columns, each as wide as a swizzle of 128 bytes, or of 64, and a block's rows follow one
another in shared memory. With ``ctas``, a mask of ranks of the cluster, each of these CTAs gets what comes, at the same
place of its own shared memory, and its own mbarrier counts the bytes. Rows that the matrix does not have become zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm

LINE = 128  # bytes of a row of a block
GATHERED = 4  # rows that one instruction brings from anywhere
_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.{mode}.mbarrier::complete_tx::bytes{how}"
_OTHER_OF_PAIR = 1 << 24  # of an address in the shared memory of a pair's second CTA


def tensor_map(matrix: cute.Tensor, rows: int, line: int = LINE) -> Any:
    """The TMA atom of a matrix (rows, columns), for boxes of so many ``rows``, 1 for ``gather_rows``, and ``line``
    bytes of each, 128 or 64."""
    shape = (rows, line * 8 // matrix.element_type.width)
    swizzle = cute.make_swizzle(line.bit_length() - 5, 4, 3)
    box = cute.make_composed_layout(swizzle, 0, cute.make_layout(shape, stride=(shape[1], 1)))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrix, box, shape)[0]


@dsl_user_op
def address_of(atom: Any, *, loc: Any = None, ip: Any = None) -> Int64:
    """Where the tensor map of a TMA atom is."""
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    made = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    pointer = cute_nvgpu.get_tma_desc_addr(kind, made, loc=loc, ip=ip)
    return Int64(pointer.toint(loc=loc, ip=ip))


@dsl_user_op
def load_rows(
    shared: Int32, tensor_map: Int64, row: Int32, barrier: Int32, blocks: Sequence[tuple[Int32, int]],
    ctas: Int32 | None = None, *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """A box from ``row`` on for each of the ``blocks``: its first column, and where it goes behind ``shared``."""
    lines = [f"[$0+{at}], [$1, {{${4 + b}, $2}}], [$3]" for b, (_, at) in enumerate(blocks)]
    values = [shared, tensor_map, row, barrier, *(Int32(column) for column, _ in blocks)]
    _copy("tile", lines, values, ctas, "", loc, ip)


@dsl_user_op
def gather_rows(
    shared: Int32, tensor_map: Int64, rows: Sequence[Int32], barrier: Int32, blocks: Sequence[tuple[Int32, int]],
    ctas: Int32 | None = None, line: int = LINE, pair: bool = False, *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Any rows, a multiple of four, one behind another; ``blocks`` as ``load_rows`` has them, ``line`` as the tensor
    map. With ``pair`` the barrier of a pair's first CTA counts the bytes of both."""
    lines = []
    if pair:
        barrier = barrier & ~_OTHER_OF_PAIR
    for first in range(0, len(rows), GATHERED):
        names = ", ".join(f"${3 + len(blocks) + first + i}" for i in range(GATHERED))
        for b, (_, at) in enumerate(blocks):
            lines.append(f"[$0+{at + first * line}], [$1, {{${3 + b}, {names}}}], [$2]")
    columns = [Int32(column) for column, _ in blocks]
    values = [shared, tensor_map, barrier, *columns, *rows]
    _copy("tile::gather4", lines, values, ctas, ".cta_group::2" if pair else "", loc, ip)


def _copy(mode: str, lines: list[str], values: list[Any], ctas: Int32 | None, group: str, loc: Any, ip: Any) -> None:
    """An instruction a line, with the mask of CTAs, if there is one, in a register of 16 bits."""
    name = _COPY.format(mode=mode, how=("" if ctas is None else ".multicast::cluster") + group)
    head, tail = "", ""
    if ctas is not None:
        head, tail = f".reg .b16 ctas; cvt.u16.u32 ctas, ${len(values)}; ", ", ctas"
        values = [*values, ctas]
    text = "".join(f"{name} {line}{tail}; " for line in lines)
    asm(None, values, f"{{ {head}{text}}}", memory=True, loc=loc, ip=ip)
