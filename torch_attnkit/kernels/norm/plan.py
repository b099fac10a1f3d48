"""How a norm spreads its rows over threads.

Device memory bounds it: y, z and out go once through the chip, w comes from the cache. A row of N elements is cut into
vectors of ``width`` elements, 16 bytes where N, the strides and the pointers allow it; a thread holds ``vectors`` of
them, so ``lanes = N / (width * vectors)`` threads, rounded up to a power of two, share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.core import invariance

# Threads of a row by its vectors, rounded up to a power of two. H200, bf16, the best of up to nine spreads each:
# 262144 x 128 (16 vectors), 65536 x 2048 (256), 16384 x 4096 (512), 32768 x 8192 (1024).
_LANES = {64: 32, 128: 64, 256: 128, 512: 512, 1024: 256}
_SMALL = 32 << 20  # bytes of a call below which latency counts, not bandwidth


@dataclass(frozen=True)
class Config:
    """``vectors`` 0 means that the row does not fit into registers and is read twice."""

    width: int
    lanes: int
    vectors: int
    threads: int
    cluster: int
    evict_first: bool  # tell the cache that the data will not be used again

    @property
    def rows(self) -> int:
        """Rows that a block works on side by side."""
        return self.threads // self.lanes


def configure(n: int, rows: int, width: int, nbytes: int, sms: int, clusters: bool) -> Config:
    """The spread of one row, for the number of rows, the bytes of the call and the number of multiprocessors.

    ``clusters``: whether a row may belong to several CTAs.
    """
    cells, evict_first = -(-n // width), nbytes < _SMALL  # vectors of a row
    if cells <= 1024:
        most = 1 << (cells - 1).bit_length()
        widest = _LANES.get(most, most)
        # Half as many threads where fewer of them would have nothing to do.
        lanes = min((widest, max(1, widest // 2)), key=lambda x: x * -(-cells // x))
        # Small blocks spread few rows over more multiprocessors: 32 rows of 128, 1.4 us against 1.8.
        least = 128 if evict_first else 512 if lanes <= 32 else 256
        threads = max(least, lanes)
        return Config(width, lanes, -(-cells // lanes), threads, 1, evict_first)
    if not clusters:
        return Config(width, 1024, 0, 1024, 1, evict_first)
    # H200, bf16: 32 rows of 16384 in clusters of 8 blocks of 256, 3.3 us against 3.4 of 4; 4096 rows, 107 of 4 against
    # 120 of 8; 1024 rows of 65536, 120 of 8 blocks of 256 against 127 of 8 and 156 of 4 blocks of 512.
    cluster = 8 if 4 * rows <= sms or cells > 4096 or invariance.is_on() else 4
    lanes = 256 if cells <= 1024 * cluster else 512
    vectors = -(-cells // (lanes * cluster))
    if vectors > 4:
        return Config(width, 1024, 0, 1024, 1, evict_first)
    return Config(width, lanes, vectors, lanes, cluster, evict_first)
