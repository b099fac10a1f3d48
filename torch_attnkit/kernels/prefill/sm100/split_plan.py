"""Into how many splits the keys of a tile are cut on Blackwell, when tiles alone leave multiprocessors idle.

Knows sizes, not ops. All times here are modelled: no Blackwell GPU has run this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_attnkit.core import invariance

from ..problem import Problem
from .plan import multiprocessors

_ROWS = 128  # of a tile
# Of one multiprocessor and microsecond: KB that its copies bring (an H200's, ``sm90/plan.py``), KB that are its
# part of 8 TB/s among 148, cycles; and per cycle: operations of its tensor cores, exponentials.
_COPIES, _MEMORY, _CYCLES = 50.0, 54.0, 1860.0
_OPERATIONS, _EXPONENTIALS = 8192.0, 16.0
# Microseconds of a CTA beside its blocks; and of a second launch that merges, an H200's 2.2 and what lies in between.
_START, _MERGE = 5.0, 4.0


@dataclass(frozen=True)
class Work:
    """A call: ``rounds`` of ``tiles`` tiles of 128 rows for each of ``heads`` KV heads (or heads that share no tile).

    ``steps`` blocks of ``tile_n`` keys are the most that a turn visits; ``rows`` are all rows of all outputs.
    """

    rounds: int
    tiles: int
    heads: int
    steps: int
    tile_n: int
    dim: int
    dim_v: int
    rows: int
    itemsize: int = 2  # bytes of an element of the keys and values, and of the products' operands

    @property
    def step(self) -> float:
        """Microseconds of a block's products or exponentials, whichever take longer; two tiles ping-pong."""
        scores = self.tiles * _ROWS * self.tile_n
        operations = scores * (self.dim + self.dim_v) * self.itemsize  # of 2 bytes; of 1 byte twice as many at a time
        return max(operations / _OPERATIONS, scores / _EXPONENTIALS) / _CYCLES

    def cost(self, num_splits: int, sms: int) -> float:
        """Microseconds, roughly, with the keys of every turn in that many splits, on ``sms`` multiprocessors."""
        pieces, size = (
            self.rounds * self.heads * num_splits,
            self.tile_n * (self.dim + self.dim_v) * self.itemsize * 1e-3,
        )
        running = min(pieces, sms)
        # The rounds of a head read the same keys at about the same time: memory brings them once.
        step = max(self.step, size / _COPIES, size * running / self.rounds / (_MEMORY * sms))
        time = -(-pieces // sms) * (_START + -(-self.steps // num_splits) * step)
        if num_splits == 1:
            return time
        written = num_splits * self.rows * self.dim_v * 4e-3  # and read again
        return time + _MERGE + 2 * written / (_MEMORY * sms)


def num_splits(problem: Problem, signature: dict[str, Any], sms: int) -> int:
    """Into how many the keys of every tile are split. As the lengths are on the device, a full cache is assumed.
    One where the batch must not decide."""
    if invariance.is_on():
        return 1
    p, group, tiles, tile_n = problem, signature["group"], signature["tiles"], signature["tile_n"]
    # A window that does not begin with a block costs one more.
    seen = min(p.keys, p.scores.most_keys(p.keys, p.queries + 1, both_sides=not p.causal) + tile_n)
    work = Work(
        -(-p.queries * group // (_ROWS * tiles)), tiles, p.batch * p.heads // group, -(-seen // tile_n), tile_n,
        p.dim, p.dim_v, p.batch * p.queries * p.heads, p.dtype.itemsize,
    )  # fmt: skip
    return cheapest(work, sms // multiprocessors(signature))


def cheapest(work: Work, sms: int) -> int:
    """The number of splits with the least cost, the smallest of several; 1 where the rounds fill the machine."""
    if work.rounds * work.heads >= sms:
        return 1
    return min(range(1, max(1, min(work.steps, sms)) + 1), key=lambda n: work.cost(n, sms))
