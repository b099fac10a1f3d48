"""mbarriers that count arrivals of warps, by shared address, from sm_80 on: CuTeDSL waits on sm_90 and later alone.

What counts bytes of bulk copies or tensor products is in ``ring.py``.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from .asm import asm
from .limits import traced
from .ring import Fixed

BYTES = 8


@dsl_user_op
def init(address: Int32, count: int, *, loc: Any = None, ip: Any = None) -> None:
    """``count`` arrivals complete a phase. One thread; a barrier of the CTA has to follow."""
    asm(None, [Int32(address)], f"mbarrier.init.shared.b64 [$0], {count};", memory=True, loc=loc, ip=ip)


def arrive(address: Int32) -> None:
    """One arrival of the whole warp, behind all that its lanes read and wrote."""
    cute.arch.sync_warp()
    _arrive_if(address, cute.arch.lane_idx())


@dsl_user_op
def _arrive_if(address: Int32, lane: Int32, *, loc: Any = None, ip: Any = None) -> None:
    text = (
        "{ .reg .pred first; .reg .b64 state; setp.eq.s32 first, $1, 0; "
        "@first mbarrier.arrive.shared.b64 state, [$0]; }"
    )
    asm(None, [Int32(address), Int32(lane)], text, memory=True, loc=loc, ip=ip)


@dsl_user_op
def wait(address: Int32, parity: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Until the phase of this parity is complete; the phase before the first one counts as complete, with parity 1."""
    ask = "try_wait" if traced().clusters else "test_wait"
    text = (
        f"{{ .reg .pred done; WAIT: mbarrier.{ask}.parity.shared.b64 done, [$0], $1; @done bra.uni DONE; "
        "bra.uni WAIT; DONE: }"
    )
    asm(None, [Int32(address), Int32(parity)], text, memory=True, loc=loc, ip=ip)


class Barriers(Fixed):
    """A full and an empty mbarrier for each of ``count`` buffers, from an address on; buffers are used in turns."""

    def __init__(self, address: Int32, count: int):
        self.address, self.count = address, count

    def init(self, full: int, empty: int) -> None:
        """By one thread; arguments are the arrivals of a phase."""
        for i in range(self.count):
            init(self.at(Int32(i)), full)
            init(self.at(Int32(i)) + BYTES, empty)

    def at(self, n: Int32) -> Int32:
        return self.address + n % self.count * (2 * BYTES)

    def wait_full(self, n: Int32) -> None:
        wait(self.at(n), n // self.count & 1)

    def wait_empty(self, n: Int32) -> None:
        """Those who had the buffer's last contents are done with them; at once where there were none."""
        wait(self.at(n) + BYTES, n // self.count & 1 ^ 1)

    def fill(self, n: Int32) -> None:
        arrive(self.at(n))

    def release(self, n: Int32) -> None:
        arrive(self.at(n) + BYTES)
