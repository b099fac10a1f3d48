"""merge_partials on Hopper and Blackwell: how a row is spread over threads, and the launch.

Device memory bounds it once there are rows enough: every partial is read once. With few rows the partials of one row
are split among ``splits`` groups of threads of a block, so that more of them are on their way at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

# Vectors of partials that a thread holds. H200, 16 partials of 32 rows of 128: 2.2 us against 2.4 with 16 splits.
_AT_ONCE = 16


@dataclass(frozen=True)
class Config:
    width: int  # elements of a vector
    lanes: int  # threads that share a row's elements: a power of two
    vectors: int  # vectors of one thread
    parts: int  # number of partials if all of them are loaded at once, else 0
    splits: int  # groups of lanes that share a row's partials
    ahead: int  # partials that a thread has on the way
    rows: int  # rows of a block
    once: bool  # tell the cache that the data will not be used again

    @property
    def threads(self) -> int:
        return self.lanes * self.splits * self.rows

    @property
    def lse_lanes(self) -> int:
        """Threads among which the values of lse are reduced: inside a warp."""
        return min(self.lanes, 32)


def configure(parts: int, rows: int, Dv: int, width: int, sms: int) -> Config:
    """The spread of one row, for the number of rows and multiprocessors."""
    cells = max(1, -(-Dv // width))  # vectors of a row
    lanes = min(32, 1 << (cells - 1).bit_length())
    while -(-cells // lanes) > 4 and lanes < 1024:
        lanes *= 2
    vectors = -(-cells // lanes)
    # H200, 2 partials: 512 threads a block against 128, 262144 rows of 128: 49.0 us against 49.7.
    once = rows * lanes < sms * 4096
    threads = 128 if once else 512
    if parts and parts * vectors <= _AT_ONCE:
        return Config(width, lanes, vectors, parts, 1, parts, max(1, threads // lanes), once)
    ahead = 1 << min(2, max(parts - 1, 0).bit_length())
    splits = 1
    while splits * ahead < parts and splits < 32 and splits * lanes < 256 and rows * lanes * splits < sms * 512:
        splits *= 2
    return Config(width, lanes, vectors, 0, splits, ahead, max(1, threads // (lanes * splits)), once)


def build(call: Call, target: Target) -> Callable[..., None]:
    a = call.arg
    parts, rows, Dv = call.dim["P"], call.dim["R"] * call.dim["H"], call.dim["Dv"]
    if rows == 0:
        return lambda *args: None
    out_dtype = a.dtype or call.dtype
    steps = (Dv, *a.out_partial.stride()[:-1])
    most = 16 // min(a.out_partial.element_size(), out_dtype.itemsize)
    widest = next(v for v in (8, 4, 2, 1) if v <= most and all(s % v == 0 for s in steps))
    sms = driver.sm_count(call.device)

    def compiled(width: int) -> Callable[..., None]:
        return compile.launcher(
            call,
            target,
            "cuda",
            dtypes=(short(call.dtype), short(out_dtype)),
            sink=a.sink is not None,
            row_sum=a.row_sum is not None,
            config=astuple(configure(parts, rows, Dv, width, sms)),
        )

    wide = compiled(widest)
    narrow: list[Callable[..., None]] = []

    def launch(
        out_partial: torch.Tensor, lse_partial: Any, sink: Any, row_sum: Any, dtype: Any, out: Any, lse: Any
    ) -> None:
        run = wide
        if widest > 1 and out_partial.data_ptr() & 15:
            narrow or narrow.append(compiled(1))
            run = narrow[0]
        run(out_partial, lse_partial, sink, row_sum, out, lse)

    return launch
