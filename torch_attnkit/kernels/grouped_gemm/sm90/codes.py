"""Codes of weights to shared memory where rows start or end amid 16 bytes: TMA takes no such steps, so the lanes of a
warp copy 8 bytes each, to the places that TMA would have swizzled them to."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda.asm import asm

from .arguments import Flags, Matrices
from .config import Config
from .schedule import WorkTile
from .shared import ROW_BYTES

_EACH = 8  # bytes
_LANES = ROW_BYTES // _EACH  # that have a row of a box
_ABREAST = 32 // _LANES  # rows


@dsl_user_op
def _copy_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 bytes of device memory to shared memory; ``valid`` 0 writes zeros and reads nothing, else it is 8."""
    text = "cp.async.ca.shared.global [$0], [$1], 8, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


@cute.jit
def copy_codes(
    config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, k: Int32, boxes: Int32,
    full: cute.Pointer,
):  # fmt: skip
    """Stage k of a work tile's rows. Every lane arrives at ``full`` when its copies are there.

    Behind a row's end come zeros. Rows behind the last have the last one's codes: nobody looks at what they give.
    """
    c, lane, codes = config, cute.arch.lane_idx(), weights.codes
    rows, nbytes = Int32(codes.shape[1]), Int32(codes.shape[2])
    part = lane % _LANES
    base = codes.iterator.toint() + Int64(tile.expert) * codes.stride[0]
    for box in cutlass.range_constexpr(c.boxes):
        column = (k * c.boxes + box) * ROW_BYTES + part * _EACH
        valid = cutlass.select_(column < nbytes, Int32(_EACH), Int32(0))
        for i in cutlass.range(c.rows // _ABREAST, unroll=4):
            local = i * _ABREAST + lane // _LANES
            row = cutlass.min(_row(c, flags, tile, local, rows), rows - 1)
            place = ((part // 2) ^ (local & 7)) * 16 + part % 2 * _EACH
            source = base + Int64(row) * codes.stride[1] + cutlass.min(column, nbytes - _EACH)
            _copy_async(boxes + (box * c.rows + local) * ROW_BYTES + place, source, valid)
    cute.arch.cp_async_mbarrier_arrive_noinc(full)


def _row(config: Config, flags: Flags, tile: WorkTile, local: Int32, rows: Int32) -> Int32:
    """Of an expert, what stands as row ``local`` in a box: of gate and up 8 each in turn."""
    if not config.paired:
        return tile.row * config.rows + local
    feature, up = tile.row * config.features + local // 16 * 8 + local % 8, local // 8 % 2
    return cutlass.select_(flags.interleaved != 0, feature * 2 + up, feature + up * (rows // 2))


def await_copies() -> None:
    """All of this lane's: a thread that ends leaves none behind."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
