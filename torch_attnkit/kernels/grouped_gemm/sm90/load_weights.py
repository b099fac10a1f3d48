"""Packed FP4 weights and their scales to shared memory.

Weights: a producer warp loads boxes by TMA, swizzled within 8 rows. Where rows start or end amid 16 bytes TMA cannot:
the warp then copies 8 bytes a lane by cp.async to the swizzled addresses. Scales: a warp reads them to registers,
converts them to bf16 factors and stores these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda import copies, memory_ops
from torch_attnkit.cuda.asm import asm
from torch_attnkit.cuda.fp4_weights import factors_of_e4m3, factors_of_e8m0
from torch_attnkit.cuda.ring import Fixed, rings

from ..arguments import Flags, Matrices
from ..problem import SPAN
from ..weight_scales import WeightScales
from ..work_tiles import WorkTile
from .config import BOX, WARPS, Config


def weight_tma(config: Config, flags: Flags, weights: Matrices) -> TmaLoads:
    """TMA of a GEMM's packed weights."""
    packed = weights.packed
    experts, rows, nbytes = packed.shape
    expert_step, row_step, _ = packed.stride
    if config.paired:
        # Steps from a gate row to the next, from it to its up row, and between groups of 8.
        interleaved = flags.interleaved != 0
        next_row = cutlass.select_(interleaved, 2 * row_step, row_step)
        up = cutlass.select_(interleaved, row_step, rows // 2 * row_step)
        steps = [cute.assume(s, divby=16) for s in (next_row, up, 8 * next_row)]
        layout = cute.make_layout(((8, 2, rows // 16), nbytes, experts), stride=(tuple(steps), 1, expert_step))
    else:
        layout = cute.make_layout((rows, nbytes, experts), stride=(row_step, 1, expert_step))
    tile = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box_layout(config))
    tensor = cute.make_tensor(packed.iterator, layout)
    op = cpasync.CopyBulkTensorTileG2SOp()
    return TmaLoads(*cpasync.make_tiled_tma_atom(op, tensor, tile, (box_rows(config), ROW_BYTES)))


@cute.jit
def copy_packed(
    config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, k: Int32, boxes: Int32,
    full: cute.Pointer,
):  # fmt: skip
    """Stage k of a tile's rows. Every lane arrives at ``full`` when its copies have landed.

    Behind a row's end are zeros. Rows behind the last repeat it: their results are not used.
    """
    c, lane, packed = config, cute.arch.lane_idx(), weights.packed
    rows, nbytes = Int32(packed.shape[1]), Int32(packed.shape[2])
    part = lane % _LANES
    base = packed.iterator.toint() + Int64(tile.expert) * packed.stride[0]
    for box in cutlass.range_constexpr(c.boxes):
        column = (k * c.boxes + box) * ROW_BYTES + part * _EACH
        valid = cutlass.select_(column < nbytes, Int32(_EACH), Int32(0))
        for i in cutlass.range(c.rows // _ROWS, unroll=4):
            local = i * _ROWS + lane // _LANES
            row = cutlass.min(weight_row(c, flags, tile, local, rows), rows - 1)
            offset = ((part // 2) ^ (local & 7)) * 16 + part % 2 * _EACH
            source = base + Int64(row) * packed.stride[1] + cutlass.min(column, nbytes - _EACH)
            copy_8_async(boxes + (box * c.rows + local) * ROW_BYTES + offset, source, valid)
    cute.arch.cp_async_mbarrier_arrive_noinc(full)


def weight_row(config: Config, flags: Flags, tile: WorkTile, local: Int32, rows: Int32) -> Int32:
    """The row of an expert at row ``local`` of a box: 8 of gate and 8 of up alternate."""
    if not config.paired:
        return tile.row * config.rows + local
    feature, up = tile.row * config.features + local // 16 * 8 + local % 8, local // 8 % 2
    return cutlass.select_(flags.interleaved != 0, feature * 2 + up, feature + up * (rows // 2))


def await_copies() -> None:
    """All of this lane's: no thread exits before its copies have landed."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


ROW_BYTES = BOX // 2  # of weights in a box, in chunks of 16 bytes that TMA swizzles within 8 rows


@cute.jit
def clear(address: Int32, size: cutlass.Constexpr):
    """All threads: zeros where copies will land."""
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


_EACH = 8  # bytes


_LANES = ROW_BYTES // _EACH  # that have a row of a box


_ROWS = 32 // _LANES  # rows


@dsl_user_op
def copy_8_async(shared: Int32, source: Int64, valid: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """8 bytes of device memory to shared memory; ``valid`` 0 writes zeros and reads nothing, else it is 8."""
    text = "cp.async.ca.shared.global [$0], [$1], 8, $2;"
    asm(None, [shared, source, valid], text, memory=True, loc=loc, ip=ip)


class TmaLoads(NamedTuple):
    """A tensor for TMA."""

    atom: cute.CopyAtom
    rows: cute.Tensor  # (rows, bytes, E); rows of gate and up as (8, 2, M / 8)


@cute.jit
def prefetch_biases(config: cutlass.Constexpr, flags: Flags, weights: Matrices, tile: WorkTile, lane: Int32):
    """Of a tile, for which its epilogue would wait as long as memory takes."""
    if flags.bias != 0:
        rows, each, bias = Int32(weights.packed.shape[1]), const_expr(config.rows // 32), weights.bias
        row = tile.row * config.rows + lane * each
        if const_expr(config.paired):
            apart = tile.row * config.features + lane % 16 * each + lane // 16 * (rows // 2)
            row = cutlass.select_(flags.interleaved != 0, row, apart)
        offset = Int64(tile.expert) * bias.stride[0] + cutlass.min(row, rows - 1)
        memory_ops.prefetch((bias.iterator + offset).toint())


class BulkScales(Fixed):
    """Scales of a tile's rows in shared memory: a ring of one stage, loaded for the next tile while this one is
    multiplied."""

    def __init__(self, config: Config, memory: Any, warp: Int32):
        self.ring = rings(memory, warp, (("lines", 1, 1, config.factor_warps),))["lines"]
        self.address = memory.allocate(config.line_bytes, 128).toint()
        clear(self.address, config.line_bytes)  # behind a row's end, and where a work tile has no row, is read, too


class ScaleLoader(WeightScales):
    """A warp's work for a stage: every lane has every 32nd row."""

    @cute.jit
    def load(self, flags: Flags, weights: Matrices, tile: WorkTile, k: Int32, lane: Int32):
        """The scales of stage k."""
        return self.read(flags, weights, tile, self.rows(flags, weights, tile, lane), k)

    @cute.jit
    def rows(self, flags: Flags, weights: Matrices, tile: WorkTile, lane: Int32) -> list[Int64]:
        """Addresses of the scales of the lane's rows; in the 128x4 layout offsets from those of its expert. Rows behind
        the last repeat it: their results are not used."""
        c = self.c
        rows, scale = Int32(weights.packed.shape[1]), weights.scale
        first, step = tile.row * c.rows + lane, Int32(32)
        if const_expr(c.paired):
            feature, up = tile.row * c.features + lane // 16 * 8 + lane % 8, lane // 8 % 2
            interleaved = flags.interleaved != 0
            first = cutlass.select_(interleaved, feature * 2 + up, feature + up * (rows // 2))
            step = cutlass.select_(interleaved, Int32(32), Int32(16))
        starts = [Int64(cutlass.min(first + i * step, rows - 1)) for i in range(c.rows // 32)]
        if flags.swizzled != 0:
            for i in cutlass.range_constexpr(c.rows // 32):
                row = Int32(starts[i])
                starts[i] = Int64(row // 128) * (Int32(scale.shape[2]) * 128) + row % 32 * 16 + row % 128 // 32 * 4
        else:
            base = scale.iterator.toint() + Int64(tile.expert) * scale.stride[0]
            for i in cutlass.range_constexpr(c.rows // 32):
                starts[i] = base + starts[i] * scale.stride[1]
        return starts

    @cute.jit
    def load_bulk(
        self,
        flags: Flags,
        weights: Matrices,
        tile: WorkTile,
        tile_idx: Int32,
        part: Int32,
        lane: Int32,
        bulk: BulkScales,
    ) -> list[Int32]:
        """The same in shared memory, to which the first scale warp copies the scales of a tile: all its rows, or those
        of gate and those of up, each contiguous in device memory."""
        c = self.c
        blocks, rows = Int32(weights.scale.shape[2]), Int32(weights.packed.shape[1])
        each, step, up = Int32(c.rows), Int32(32), Int32(0)  # rows of a copy; rows from a lane's to its next, to up
        local = lane
        if const_expr(c.paired):
            local, interleaved = lane // 16 * 8 + lane % 8, flags.interleaved != 0
            each, step = (
                cutlass.select_(interleaved, each, Int32(c.features)),
                cutlass.select_(interleaved, step, Int32(16)),
            )
            up = cutlass.select_(interleaved, Int32(0), rows // 2)
            local = cutlass.select_(interleaved, local * 2, local) + lane // 8 % 2 * cutlass.select_(
                interleaved, Int32(1), each
            )
        if part == 0:
            count = cutlass.min(each, cutlass.select_(up > 0, up, rows) - tile.row * each)
            nbytes = count * blocks
            full = bulk.ring.acquire(tile_idx, cutlass.select_(up > 0, 2 * nbytes, nbytes))
            cute.arch.sync_warp()  # announced before it begins
            source = weights.scale.iterator.toint() + Int64(tile.expert) * weights.scale.stride[0]
            source += Int64(tile.row * each + lane * up) * blocks
            if lane < cutlass.select_(up > 0, Int32(2), Int32(1)):
                memory_ops.bulk_load(bulk.address + lane * each * blocks, source, nbytes, full.toint())
        bulk.ring.wait(tile_idx)
        return [bulk.address + (local + i * step) * blocks for i in range(c.rows // 32)]

    @cute.jit
    def store(self, fragments: list[cute.Tensor], lane: Int32, address: Int32):
        """(span, row, quad), of which a lane of the consumers reads 2 or 4 bytes."""
        c = self.c
        convert = factors_of_e4m3 if c.format == "nvfp4" else factors_of_e8m0
        count = const_expr(SPAN // c.block // 4)  # words of scales in a span, each of 4
        for i, rS in enumerate(fragments):
            for span in cutlass.range_constexpr(c.stage // SPAN):
                offset = address + (span * c.rows + lane + 32 * i) * (8 * count)
                sF = cute.make_tensor(
                    cute.make_ptr(Uint32, offset, cute.AddressSpace.smem, assumed_align=8), cute.make_layout(2 * count)
                )
                rF = cute.make_rmem_tensor(2 * count, Uint32)
                for j in cutlass.range_constexpr(count):
                    rF[2 * j], rF[2 * j + 1] = convert(rS[span * count + j])
                cute.autovec_copy(rF, sF)
