"""Dynamic persistent tile scheduler: a CTA takes work tiles by atomics and publishes them to its warps by a ring."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_attnkit.cuda import memory_ops
from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.ring import Fixed, Ring

from ..arguments import Tensors, chosen
from ..work_tiles import WorkTile
from .config import MOST_COLUMNS, TILES, Config


def width_of(config: Config, columns: Int32) -> Int32:
    """Tokens that are multiplied for a tile of ``columns``: those beyond are zeros."""
    padded = Int32(8 * config.widths[-1])
    for width in reversed(config.widths[:-1]):
        padded = cutlass.select_(columns <= 8 * width, Int32(8 * width), padded)
    return padded


UP, DOWN, NONE = 0, 1, -1  # to which product a work tile belongs; none is left
_IN_FLIGHT = 8  # of a token's choices that a lane has on their way


class RowTiles(NamedTuple):
    """Tiles of rows of both GEMMs' weights."""

    up: Int32
    down: Int32


class DynamicScheduler(NamedTuple):
    """Tickets for tiles, taken by atomics: all of the first GEMM, then all of the second, of those that the launch has;
    an expert's consecutive. So whoever has one of the second knows that all of the first have been taken by running
    CTAs: no CTA waits for one that has not started."""

    row_tiles: RowTiles
    token_tiles: Int32

    @property
    def ups(self) -> Int32:
        return self.token_tiles * self.row_tiles.up

    @property
    def all(self) -> Int32:
        return self.token_tiles * (self.row_tiles.up + self.row_tiles.down)

    @cute.jit
    def work(self, lines: cute.Tensor, ticket: Int32):
        """GEMM, token tile and work tile; ``lines`` as ``Tensors.tiles``."""
        down = ticket >= self.ups
        rest = cutlass.select_(down, ticket - self.ups, ticket)
        each = cutlass.select_(down, self.row_tiles.down, self.row_tiles.up)
        line = rest // cutlass.max(each, 1)  # a launch of the first GEMM alone, behind its last
        expert, first, columns = Int32(0), Int32(0), Int32(0)
        if ticket < self.all:
            expert, first, columns = lines[1 + line, 0], lines[1 + line, 1], lines[1 + line, 2]
        product = cutlass.select_(down, Int32(DOWN), Int32(UP))
        return product, line, WorkTile(expert, first, columns, rest - line * each)


def _tickets(tensors: Tensors, launch: int) -> cute.Pointer:
    """The counter of tickets taken, one for each launch, behind those of tokens, since CTAs of the second may start
    before the last of the first exits. ``launch``: its last GEMM."""
    return tensors.count.iterator + (Int32(tensors.indices.shape[0]) * tensors.count.stride[0] + launch)


@cute.jit
def take(tensors: Tensors, launch: cutlass.Constexpr):
    """A ticket, in lane 0, which nothing waits for until it is used."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(_tickets(tensors, launch), Int32(1), sem="relaxed", scope="gpu")
    return ticket


@cute.jit
def end_tickets(tensors: Tensors, scheduler: DynamicScheduler, ticket: Int32, launch: cutlass.Constexpr):
    """The last CTA to find no tile left resets the counter."""
    if (cute.arch.lane_idx() == 0) & (ticket == scheduler.all + cute.arch.grid_dim()[0] - 1):
        cute.arch.atomic_add(_tickets(tensors, launch), -(ticket + 1), sem="relaxed", scope="gpu")


def _parts_of_h(tensors: Tensors, line: Int32) -> Int64:
    """Address of the counter of row tiles of the first GEMM that are written, of a token tile."""
    slots = Int32(tensors.indices.shape[0]) * Int32(tensors.indices.shape[1])
    return tensors.order.iterator.toint() + Int64(slots + line) * 4


@cute.jit
def signal_h(tensors: Tensors, line: Int32):
    """By one warp, after the stores: a part of h is visible to all CTAs. Bulk copies will read it, which use the async
    proxy."""
    if cute.arch.lane_idx() == 0:
        cute.arch.fence_proxy("async.global")
        op.add_acq_rel(_parts_of_h(tensors, line), Int32(1))


@cute.jit
def await_h(tensors: Tensors, line: Int32, parts: Int32):
    """By one warp: until all of h is written of a token tile."""
    if cute.arch.lane_idx() == 0:
        while memory_ops.load_acquire(_parts_of_h(tensors, line)) < parts:
            pass
    cute.arch.sync_warp()
    cute.arch.fence_proxy("async.global")


_PRODUCT = len(WorkTile._fields)  # words of a work tile in shared memory: of ``WorkTile``, and
_LINE, _FACTOR = _PRODUCT + 1, _PRODUCT + 2
_HEADER = 8  # words before those of its tokens
assert _FACTOR < _HEADER
assert MOST_COLUMNS == 32  # a lane each


class TileRing(Fixed):
    """Tiles and their tokens' slots, weights and counts, in a ring of shared memory that the scheduler warp fills
    ahead. Coordinates are published first (``announced``), what needs more loads later (``ring``)."""

    def __init__(self, announced: Ring, ring: Ring, memory: Any):
        self.announced, self.ring = announced, ring
        words = cute.make_layout((_HEADER + 3 * MOST_COLUMNS, TILES), stride=(1, _HEADER + 3 * MOST_COLUMNS))
        self.sWords = memory.allocate_tensor(Int32, words, 16)

    @cute.jit
    def announce(self, tile_idx: Int32, tile: WorkTile, product: Int32, line: Int32):
        """``line``: number of its tile of tokens."""
        self.ring.await_empty(tile_idx)
        full, stage = self.announced.await_empty(tile_idx), self.ring.slot(tile_idx)
        if cute.arch.lane_idx() == 0:
            for i, word in enumerate((*tile, product, line)):
                self.sWords[i, stage] = word
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def publish(self, tensors: Tensors, tile_idx: Int32, slot: Int32, columns: Int32, product: Int32, factor: Float32):
        """``slot``: of a lane's token; ``factor``: of the accumulators. For the second GEMM also the weights of
        choices, and how many a token has."""
        lane = cute.arch.lane_idx()
        top_k = Int32(tensors.indices.shape[1])
        weight, choices = Float32(0.0), Int32(0)
        if (product == DOWN) & (lane < columns):
            weight = tensors.weights[slot // top_k, slot % top_k]
            for k in cutlass.range(0, top_k, _IN_FLIGHT, unroll=1):
                some = [chosen(tensors, slot // top_k, cutlass.min(k + i, top_k - 1)) for i in range(_IN_FLIGHT)]
                for i in cutlass.range_constexpr(_IN_FLIGHT):
                    choices += cutlass.select_((k + i < top_k) & (some[i] >= 0), Int32(1), Int32(0))
        stage = self.ring.slot(tile_idx)
        if lane == 0:
            self.sWords[_FACTOR, stage] = factor.bitcast(Int32)
        for i, word in enumerate((slot, weight.bitcast(Int32), choices)):
            self.sWords[_HEADER + i * MOST_COLUMNS + lane, stage] = word
        cute.arch.sync_warp()  # orders the warp's stores before the arrival
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.ring.full + stage)

    @cute.jit
    def end(self, tile_idx: Int32):
        """No work tile is left."""
        self.announce(tile_idx, WorkTile(Int32(0), Int32(0), Int32(0), Int32(0)), Int32(NONE), Int32(0))
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.ring.full + self.ring.slot(tile_idx))

    def await_announced(self, tile_idx: Int32) -> Int32:
        """The GEMM; a warp that has read calls ``release_announced``."""
        self.announced.wait(tile_idx)
        return self._word(tile_idx, _PRODUCT)

    def wait(self, tile_idx: Int32) -> Int32:
        """The GEMM; a warp that has read calls ``release``."""
        self.ring.wait(tile_idx)
        return self._word(tile_idx, _PRODUCT)

    def release_announced(self, tile_idx: Int32) -> None:
        self._read()
        self.announced.release(tile_idx)

    def release(self, tile_idx: Int32) -> None:
        self._read()
        self.ring.release(tile_idx)

    def _read(self) -> None:
        """A warp's reads have completed, which an arrival alone would not wait for (``MmaMainloop``)."""
        cute.arch.fence_acq_rel_cta()
        cute.arch.sync_warp()

    def _word(self, tile_idx: Int32, i: int) -> Int32:
        """Uniform over the warp, so it takes no vector registers."""
        return cute.arch.make_warp_uniform(self.sWords[i, self.ring.slot(tile_idx)])

    def tile(self, tile_idx: Int32) -> WorkTile:
        return WorkTile(*(self._word(tile_idx, i) for i in range(_PRODUCT)))

    def line(self, tile_idx: Int32) -> Int32:
        return self._word(tile_idx, _LINE)

    def factor(self, tile_idx: Int32) -> Float32:
        return self.sWords[_FACTOR, self.ring.slot(tile_idx)].bitcast(Float32)

    def slot(self, tile_idx: Int32, column: Int32) -> Int32:
        return self.sWords[_HEADER + column, self.ring.slot(tile_idx)]

    def weight(self, tile_idx: Int32, column: Int32) -> Float32:
        return self.sWords[_HEADER + MOST_COLUMNS + column, self.ring.slot(tile_idx)].bitcast(Float32)

    def choices(self, tile_idx: Int32, column: Int32) -> Int32:
        """How many results a token has."""
        return self.sWords[_HEADER + 2 * MOST_COLUMNS + column, self.ring.slot(tile_idx)]
