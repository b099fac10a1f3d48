"""How a top-k spreads its rows over blocks and threads.

A row belongs to a CTA or to a cluster of them. Each thread keeps up to ``PER_THREAD`` scores in registers, so a row
of up to 262,144 crosses device memory once. Of a longer one parts are rows, and what is chosen of each is chosen among
by a second launch; where that were too many, the row is read again, from L2, for every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

# Scores of a thread: one bit each in a word. 16 of few rows are no faster (H200, float32: 1 x 8192 and 64 x 8192 within
# 2 %), and blocks of 1024 threads slower: 32 rows of 65,536 take 13.7 us, blocks of 512 with 32 each 8.6.
PER_THREAD = 32
_STREAMED = 16  # the same where they are read again for every pass
LANES = 32
_MOST_THREADS, _MOST_BLOCKS = 1024, 8  # of a block, of a cluster
_LEAST_THREADS = 256
_SHARE = 8192  # scores of a block below which a row is not spread over more blocks
_REGISTERS = 64  # of a thread that holds PER_THREAD scores
_FILE = 1 << 16  # registers of a multiprocessor


@dataclass(frozen=True)
class Config:
    width: int  # elements of a load
    vectors: int  # loads of a thread, at a time
    threads: int
    cluster: int  # blocks that share a row
    resident: bool  # whether the threads of a row hold it in registers

    @property
    def warps(self) -> int:
        return self.threads // LANES

    @property
    def tile(self) -> int:
        """Scores that a warp works on at a time; they follow one another."""
        return LANES * self.width * self.vectors

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor shall hold."""
        return max(1, _FILE // (_REGISTERS * self.threads))


def part_of(entries: int, rows: int, topk: int, sms: int) -> int:
    """Entries of the parts of which rows are made, a part for each block; 0: rows stay whole."""
    most = _MOST_THREADS * PER_THREAD
    if entries <= _MOST_BLOCKS * most:
        return 0
    part = _SHARE
    # At once, if they can be; and each leaves a quarter of itself at most.
    while part < most and (-(-entries // part) * rows > sms or 4 * topk > part):
        part *= 2
    return part if 4 * topk <= part and -(-entries // part) * topk <= _MOST_BLOCKS * most else 0


def configure(entries: int, rows: int, width: int, sms: int, clusters: bool) -> Config:
    """The spread of rows of ``entries`` scores that loads of ``width`` elements can read.

    ``clusters``: whether a row may belong to several CTAs.
    """
    cluster = 1
    while (
        clusters
        and cluster < _MOST_BLOCKS
        and (
            entries > cluster * _MOST_THREADS * PER_THREAD
            or (2 * cluster * rows <= sms and entries >= 2 * cluster * _SHARE)
        )
    ):
        cluster *= 2
    share = -(-entries // cluster)  # of a block
    # Small blocks, of which one computes while another waits for memory, or for its cluster.
    threads = min(_MOST_THREADS, max(_LEAST_THREADS, 1 << (-(-share // PER_THREAD) - 1).bit_length()))
    vectors = max(1, -(-share // (threads * width)))
    if vectors * width > PER_THREAD:
        return Config(width, _STREAMED // width, threads, cluster, resident=False)
    return Config(width, vectors, threads, cluster, resident=True)
