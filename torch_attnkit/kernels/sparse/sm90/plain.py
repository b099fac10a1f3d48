"""Tiles of keys that are numbers, row by row, by ``cp.async``."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from torch_attnkit.cuda import warp_ops as op
from torch_attnkit.cuda.smem import CHUNK

from .arguments import Tensors
from .config import HALVES, LOADERS, Config
from .meeting import Meeting
from .places import Places, held_by, warp_of_producer
from .schedule import Row


class PlainTiles:
    """How a producer fills the ring where rows are as they are multiplied."""

    def __init__(self, config: Config):
        self.c, self.places = config, Places(config)

    def divisor(self, tensors: Tensors) -> Any:
        """Numbers are divided by nothing."""
        return None

    @cute.jit
    def load(self, row: Row, divisor: Any, shared: Int32, meeting: Meeting, filled: Int32, n: Int32):
        """Tile n of the work tile, before which ``filled`` came; rows that do not count become zeros. The columns of
        the warpgroup that computes its scores come first, since that one gives their place back first."""
        counts = self.places.counts(row)
        for i in cutlass.range_constexpr(HALVES):
            half = (n + i) % HALVES
            self._load_half(row.address, counts, half, shared, meeting, (filled + n) * HALVES + half, True)

    def bring(
        self, rows: list[Row], divisor: Any, shared: Int32, meeting: Meeting, tiles: range, warpgroup: int
    ) -> None:
        """Of these tiles, whose places are free, the columns that a consumer warpgroup multiplies, 1 or 2."""
        half = warpgroup - 1
        for row, n in zip(rows, tiles, strict=True):
            fill = Int32(n * HALVES + half)
            self._load_half(row.address, self.places.counts(row), Int32(half), shared, meeting, fill, half == 0)

    def finish(self, divisor: Any, shared: Int32, meeting: Meeting, filled: Int32) -> None:
        """After the last of ``filled`` tiles."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def _load_half(
        self, address: Int64, counts: Int32, half: Int32, shared: Int32, meeting: Meeting, n: Int32,
        masked: cutlass.Constexpr,
    ):  # fmt: skip
        """Half of the columns of this warp's rows, which is fill n of the ring; ``masked``: say which of them count."""
        warp, lane = warp_of_producer(), cute.arch.lane_idx()
        column = (half * self.places.chunks + lane % self.places.chunks) * CHUNK
        full = meeting.tiles.await_empty(n)
        place = self.places.place(shared, meeting, n)
        for i in cutlass.range_constexpr(self.places.rows // self.places.abreast):
            mine = i * self.places.abreast + lane // self.places.chunks
            to = self.places.chunk_at(place, mine * LOADERS + warp)
            op.copy_16_async(to, held_by(mine, address) + column, ((counts >> mine) & 1) * CHUNK)
        if lane == 0:
            if const_expr(masked):
                self.places.set_mask(shared, meeting, n, counts)
            cute.arch.mbarrier_arrive(full)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
