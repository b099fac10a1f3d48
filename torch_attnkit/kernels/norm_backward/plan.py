"""How the backward of a norm spreads its rows over threads.

Device memory bounds it: grad, y and z are read once, dy and dz written once. ``lanes`` threads share a row, each with
``vectors`` vectors of ``width`` elements, and go on to further rows, so that a thread's columns stay the same and it
adds up their shares of dw in registers. Every block leaves one row of sums; a second launch adds these up.
"""

from __future__ import annotations

from dataclasses import dataclass

_LANES = 512  # of a row; with two vectors each, three inputs and three products fit into 128 registers
_VECTORS = 2
_THREADS = 256  # of a block, where a row needs no more
_PER_SM = 1024  # threads: more blocks hide more of a row's latency, and leave more rows of sums


@dataclass(frozen=True)
class Config:
    """``vectors`` 0 means that the row does not fit into registers: it is read twice, and sums stand in memory."""

    width: int
    lanes: int
    vectors: int
    threads: int

    @property
    def rows(self) -> int:
        """Rows that a block works on side by side."""
        return self.threads // self.lanes


def configure(n: int, width: int) -> Config:
    """The spread of a row of ``n`` elements."""
    cells = -(-n // width)  # vectors of a row
    if cells > _LANES * _VECTORS:
        return Config(width, 2 * _LANES, 0, 2 * _LANES)
    lanes = min(1 << (cells - 1).bit_length(), _LANES)
    return Config(width, lanes, -(-cells // lanes), max(lanes, _THREADS))


def blocks_of(config: Config, rows: int, sms: int) -> int:
    """Blocks of a launch, and rows of sums that they leave."""
    return min(-(-rows // config.rows), sms * max(1, _PER_SM // config.threads))
