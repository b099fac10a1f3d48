"""What the lanes of a warp do to each other: each case is missed by a checker to which a warp is one agent."""

from __future__ import annotations

import pytest

from .async_pieces import aligned
from .checked import BULK_STORE, STORED, Case, assert_case, mbarriers, parametrize, reports, wait

pytestmark = pytest.mark.simulator

NEIGHBOUR = """
xor.b32 %r5, %r2, 1;
shl.b32 %r5, %r5, 2;
add.u32 %r5, %r5, %r3;
"""
RACE = r"data race \({}\)[^$]*by lanes of one warp"
READ_AFTER_WRITE, WRITE_AFTER_READ = RACE.format("read after write"), RACE.format("write after read")

CASES = [
    Case(
        "a_neighbours_store",
        READ_AFTER_WRITE,
        NEIGHBOUR
        + """
st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff; // needed
ld.shared.b32 %r6, [%r5];
""",
        block=32,
    ),
    Case(
        "a_neighbours_store_to_global_memory",
        READ_AFTER_WRITE,
        """
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %in0, %d1;
xor.b32 %r5, %r2, 1;
mul.wide.u32 %d2, %r5, 4;
add.u64 %d2, %in0, %d2;
st.global.b32 [%d1], %r2;
bar.warp.sync 0xffffffff; // needed
ld.global.b32 %r6, [%d2];
""",
        block=32,
        arrays=(128,),
    ),
    Case(
        "a_shuffle_and_a_vote_order_nothing",
        READ_AFTER_WRITE,
        NEIGHBOUR
        + """
st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff; // needed
shfl.sync.bfly.b32 %r7, %r2, 1, 31, 0xffffffff;
vote.sync.any.pred %p2, %p1, 0xffffffff;
redux.sync.add.s32 %r8, %r2, 0xffffffff;
ld.shared.b32 %r6, [%r5];
""",
        block=32,
    ),
    Case(
        "half_a_warp_has_met",
        READ_AFTER_WRITE,
        """
xor.b32 %r5, %r2, 16;
shl.b32 %r5, %r5, 2;
add.u32 %r5, %r5, %r3;
setp.lt.u32 %p2, %r2, 16;
st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff; // needed
@%p2 bar.warp.sync 0xffff;
@!%p2 bar.warp.sync 0xffff0000;
ld.shared.b32 %r6, [%r5];
""",
        block=32,
    ),
    Case(
        "one_overwrites_what_all_have_read",
        WRITE_AFTER_READ,
        """
@%p1 st.shared.b32 [%r3], %r2;
bar.warp.sync 0xffffffff;
ld.shared.b32 %r6, [%r3];
bar.warp.sync 0xffffffff; // needed
@%p1 st.shared.b32 [%r3], %r3;
""",
        block=32,
    ),
    Case(
        "matrices_of_rows_that_lanes_have_stored",
        READ_AFTER_WRITE,
        """
shl.b32 %r5, %r2, 4;
add.u32 %r5, %r5, %r3;
st.shared.v4.b32 [%r5], {%r2, %r2, %r2, %r2};
bar.warp.sync 0xffffffff; // needed
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r5];
""",
        block=32,
    ),
    Case(
        "an_elected_lane_arrives_for_what_others_have_stored",
        r"data race \(read after write\)",
        mbarriers(1)
        + """
@%p0 st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff; // needed
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
@%p0 bra OUT;
"""
        + wait()
        + """
ld.shared.b32 %r5, [%r4];
OUT: bar.sync 0;
""",
    ),
    Case(
        "an_elected_lane_arrives_for_what_others_have_read",
        r"data race \(write after read\)",
        mbarriers(1)
        + """
@!%p0 st.shared.b32 [%r3], %r1;
bar.sync 0;
@%p0 ld.shared.b32 %r5, [%r3];
bar.warp.sync 0xffffffff; // needed
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
@%p0 bra OUT;
"""
        + wait()
        + """
st.shared.b32 [%r3], %r3;
OUT: bar.sync 0;
""",
    ),
    Case(
        "an_elected_lane_waits",
        r"data race|read of uninitialised",
        mbarriers(1)
        + """
setp.eq.u32 %p2, %r0, 32;
@%p0 st.shared.b32 [%r4], %r2;
@%p0 bar.warp.sync 0xffffffff;
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
@!%p2 bra GO;
"""
        + wait()
        + """
GO: mov.u32 %r9, 0;
bar.warp.sync 0xffffffff; // needed
@!%p0 ld.shared.b32 %r5, [%r4];
bar.sync 0;
""",
    ),
    Case(
        "an_elected_lane_waits_for_a_bulk_store",
        r"data race \(write after read\)",
        STORED
        + BULK_STORE
        + """
@%p1 cp.async.bulk.wait_group 0;
bar.warp.sync 0xffffffff; // needed
st.shared.b32 [%r4], %r3;
""",
        block=32,
        arrays=(128,),
    ),
    Case(
        "a_proxy_fence_by_another_lane",
        r"missing fence.proxy.async",
        """
setp.eq.u32 %p2, %r0, 1;
st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff;
@%p1 fence.proxy.async.shared::cta; // needed
// wrong:@%p2 fence.proxy.async.shared::cta;
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group 0;",
        block=32,
        arrays=(128,),
    ),
    Case(
        "a_proxy_fence_by_one_of_those_that_have_stored",
        r"missing fence.proxy.async",
        """
st.shared.b32 [%r4], %r2;
fence.proxy.async.shared::cta; // needed
// wrong:@%p1 fence.proxy.async.shared::cta;
bar.warp.sync 0xffffffff;
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group 0;",
        block=32,
        arrays=(128,),
    ),
    Case(
        "a_bulk_store_of_what_others_have_stored",
        r"data race \(read after write\)",
        """
st.shared.b32 [%r4], %r2;
fence.proxy.async.shared::cta;
bar.warp.sync 0xffffffff; // needed
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group 0;",
        block=32,
        arrays=(128,),
    ),
    Case(
        "an_mbarrier_that_another_lane_has_made",
        r"use of an mbarrier that is not ordered after its mbarrier.init",
        """
setp.eq.u32 %p2, %r0, 1;
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
bar.warp.sync 0xffffffff; // needed
@%p2 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
""",
        block=32,
    ),
]

RIGHT = {
    "halves_of_a_word": """
mad.lo.u32 %r5, %r2, 2, %r3;
mov.b32 {%h1, %h2}, %r2;
st.shared.b16 [%r5], %h1;
ld.shared.b16 %h3, [%r5];
st.shared.b16 [%r5], %h3;
""",
    "bytes_of_a_word": """
add.u32 %r5, %r2, %r3;
st.shared.b8 [%r5], %r2;
ld.shared.u8 %r6, [%r5];
st.shared.b8 [%r5], %r6;
""",
    "every_lane_arrives_and_waits": """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 32;
bar.warp.sync 0xffffffff;
st.shared.b32 [%r4], %r2;
mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
ld.shared.b32 %r5, [%r4 + 0];
xor.b32 %r5, %r4, 4;
ld.shared.b32 %r6, [%r5];
""",
    "a_lane_stores_fences_and_copies_alone": """
@%p1 st.shared.v4.b32 [%r3], {%r2, %r2, %r2, %r2};
@%p1 fence.proxy.async.shared::cta;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%in0], [mem], 16;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
@%p1 st.shared.v4.b32 [%r3], {%r3, %r2, %r2, %r2};
""",
    "lanes_take_a_lock": """
mov.u32 %r5, 0;
@%p1 st.shared.b32 [%r3], %r5;
bar.warp.sync 0xffffffff;
atom.shared.acq_rel.cta.add.u32 %r6, [%r3], 1;
ld.acquire.cta.shared.u32 %r7, [%r3];
""",
}


@parametrize(CASES)
def test_case(case: Case) -> None:
    assert_case(case)


@pytest.mark.parametrize("name", RIGHT)
def test_no_false_report(name: str) -> None:
    for seed in (0, 1, 2):
        assert reports(RIGHT[name], aligned(128), block=32, seed=seed) == []


def test_a_report_names_the_lanes() -> None:
    (report,) = reports(NEIGHBOUR + "st.shared.b32 [%r4], %r2;\nld.shared.b32 %r6, [%r5];", block=32)
    assert report.splitlines()[-2].endswith("with nothing in between that orders them: lane 0 after lane 1")
