"""How a merge spreads its rows over threads.

With many rows it is bound by device memory: every partial is read once. With few rows the partials of one row are split
among ``splits`` groups of threads of a CTA, so that more of them are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.core import invariance

# Vectors of partials that a thread holds. H200, 16 partials of 32 rows of 128: 2.2 us against 2.4 with 16 splits.
_VECTORS_PER_THREAD = 16


@dataclass(frozen=True)
class Config:
    width: int  # elements of a vector
    lanes: int  # threads that share a row's elements: a power of two
    vectors: int  # vectors of one thread
    parts: int  # number of partials if all of them are loaded at the same time, else 0
    splits: int  # groups of lanes that share a row's partials
    ahead: int  # partials that a thread has in flight
    rows: int  # rows of a block
    evict_first: bool  # the cache policy of the partials

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
    evict_first = rows * lanes < sms * 4096
    threads = 128 if evict_first else 512
    if parts and parts * vectors <= _VECTORS_PER_THREAD:
        return Config(width, lanes, vectors, parts, 1, parts, max(1, threads // lanes), evict_first)
    ahead = 1 << min(2, max(parts - 1, 0).bit_length())
    splits = 1
    while splits * ahead < parts and splits < 32 and splits * lanes < 256:
        if rows * lanes * splits >= sms * 512 and not invariance.is_on():
            break
        splits *= 2
    return Config(width, lanes, vectors, 0, splits, ahead, max(1, threads // (lanes * splits)), evict_first)
