"""Waits that do not look at the answer: however often they ask, and whether the phase is over when they do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from torch_attnkit.parity.runners import SCHEDULES

from .async_pieces import aligned
from .checked import mbarriers, reports
from .snippet import run

pytestmark = pytest.mark.simulator

TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;\n"
POLLS = {
    "once": TRY,
    "with a jump on": TRY + "@!%p7 bra GO;\nGO:\n",
    "with a jump on either way": TRY + "@%p7 bra GO;\nbra GO;\nGO:\n",
    "with another register": "setp.eq.u32 %p6, %r0, %r0;\nW1: " + TRY + "@!%p6 bra W1;\n",
    "twice": TRY + "@%p7 bra GO;\n" + TRY + "GO:\n",
    "five times": "mov.u32 %r20, 0;\nW1: "
    + TRY
    + "@%p7 bra GO;\nadd.u32 %r20, %r20, 1;\nsetp.lt.u32 %p6, %r20, 5;\n@%p6 bra W1;\nGO:\n",
}
LOOPS = {
    "at once": "W1: " + TRY + "@!%p7 bra W1;\n",
    "as CuTeDSL writes it": "W1: " + TRY + "@%p7 bra GO;\nbra W1;\nGO:\n",
    "counting": "mov.u32 %r20, 0;\nW1: " + TRY + "add.u32 %r20, %r20, 1;\n@!%p7 bra W1;\n",
    "after a first look": TRY + "mov.u32 %r20, 5;\n@%p7 bra GO;\nW1: " + TRY + "@!%p7 bra W1;\nGO:\n",
}


def by_a_warp(wait: str) -> str:
    """Warp 0 stores and arrives, warp 1 waits and reads."""
    return f"""
{mbarriers(1)}
@!%p0 bra OTHER;
st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff;
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
bra OUT;
OTHER:
{wait}
ld.shared.b32 %r5, [%r4];
OUT: bar.sync 0;
"""


def by_a_copy(wait: str) -> str:
    """A bulk copy fills 128 bytes that both warps read. Nobody leaves before it is over."""
    return f"""
{mbarriers(1)}
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 128;
@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [mem], [%in0], 128, [mem + 4096];
bar.warp.sync 0xffffffff;
{wait}
ld.shared.b32 %r5, [%r4];
END: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra END;
"""


def found(body: str, seed: int) -> list[str]:
    return reports(body, aligned(128), block=64, seed=seed)


@pytest.mark.parametrize("polls", POLLS)
@pytest.mark.parametrize("producer", [by_a_warp, by_a_copy])
def test_an_ignored_answer_is_reported_at_every_hostile_seed(producer: Callable[[str], str], polls: str) -> None:
    for seed in range(1, 41):
        missed = found(producer(POLLS[polls]), seed)
        assert missed and all(re.match("data race|read of uninitialised", r) for r in missed), seed
    assert SCHEDULES > 1  # so that one of parity's is hostile


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("producer", [by_a_warp, by_a_copy])
def test_a_loop_that_looks_at_the_answer_is_right(producer: Callable[[str], str], loop: str) -> None:
    for seed in range(41):
        assert found(producer(LOOPS[loop]), seed) == []


def test_what_is_known_already_is_answered() -> None:
    """A wait after a barrier behind which everybody knows of the phase: false would be an answer that no GPU gives."""
    body = f"""
{mbarriers(1)}
@%p0 st.shared.b32 [%r4], %r2;
@%p0 bar.warp.sync 0xffffffff;
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
bar.sync 0;
{TRY}
@!%p7 trap;
ld.shared.b32 %r5, [%r4];
"""
    for seed in range(1, 41):
        assert found(body, seed) == []


def test_refusals_end_without_the_checker() -> None:
    body = """
mov.u32 %r0, smem;
setp.eq.u32 %p1, %tid, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r0], 32;
bar.warp.sync 0xffffffff;
mbarrier.arrive.shared::cta.b64 %d1, [%r0];
W: mbarrier.try_wait.shared::cta.b64 %p0, [%r0], %d1;
add.u32 %r1, %r1, 1;
@!%p0 bra W;
"""
    for seed in range(8):
        run(body, shared=64, seed=seed)
