"""The checker on shared memory, barriers and atomics: what has to be reported is, and its corrected twin is not."""

from __future__ import annotations

import pytest

from .checked import Case, assert_case, parametrize, reports

pytestmark = pytest.mark.simulator

INIT = """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
bar.sync 0;
"""

CASES = [
    Case(
        "read_after_write",
        r"data race \(read after write\)",
        """
@%p0 st.shared.b32 [%r4], %r2;
bar.sync 0; // needed
@!%p0 ld.shared.b32 %r5, [%r4];
""",
    ),
    Case(
        "write_after_read",
        r"data race \(write after read\)",
        """
@%p0 st.shared.b32 [%r4], %r2;
bar.sync 0;
@!%p0 ld.shared.b32 %r5, [%r4];
bar.sync 0; // needed
@%p0 st.shared.b32 [%r4], %r3;
""",
    ),
    Case(
        "write_after_several_readers",
        r"data race \(write after read\)",
        """
@%p0 st.shared.b32 [%r4], %r2;
bar.sync 0;
setp.le.u32 %p2, %r1, 1;
setp.ge.u32 %p3, %r1, 2;
ld.shared.b32 %r5, [%r4];
@%p2 bar.sync 1, 64;
@%p3 bar.arrive 2, 96; // needed
@%p0 bar.sync 2, 96; // needed
@%p0 st.shared.b32 [%r4], %r3;
""",
        block=128,
    ),
    Case(
        "write_after_write",
        r"data race \(write after write\)",
        """
@%p0 st.shared.b32 [%r4], %r2;
bar.sync 0; // needed
@!%p0 st.shared.b32 [%r4], %r0;
""",
    ),
    Case(
        "same_value",
        r"note: data race that writes the value that is there",
        """
@%p0 st.shared.b32 [%r4], %r2;
bar.sync 0; // needed
@!%p0 st.shared.b32 [%r4], %r2;
bar.sync 0;
ld.shared.b32 %r5, [%r4];
""",
    ),
    Case(
        "same_value_read_by_one_that_knows_the_first",
        r"note: data race that writes the value that is there",
        """
setp.eq.u32 %p2, %r1, 1;
setp.eq.u32 %p3, %r1, 2;
@%p0 st.shared.b32 [%r4], %r2;
// wrong:@%p2 st.shared.b32 [%r4], %r2;
@%p0 bar.arrive 2, 64;
@%p3 bar.sync 2, 64;
@%p3 ld.shared.b32 %r5, [%r4];
""",
        block=96,
    ),
    Case(
        "halves_of_a_word",
        r"data race \(write after write\)",
        """
mad.lo.u32 %r5, %r2, 4, %r3;
shl.b32 %r6, %r1, 1;
add.u32 %r5, %r5, %r6;
mov.b32 {%h1, %h3}, %r0;
// wrong:@!%p0 sub.u32 %r5, %r5, 2;
st.shared.b16 [%r5], %h1;
bar.sync 0;
ld.shared.b16 %h2, [%r5];
""",
    ),
    Case(
        "uninitialised_bytes",
        r"read of uninitialised memory",
        """
mov.b32 {%h1, %h3}, %r2;
st.shared.b16 [%r4], %h1;
st.shared.b16 [%r4 + 2], %h1; // needed
ld.shared.b32 %r5, [%r4];
""",
        block=32,
    ),
    Case(
        "arrive_and_sync",
        r"data race \(read after write\)",
        """
@%p0 st.shared.b32 [%r4], %r2;
@%p0 bar.arrive 3, 64; // needed
@!%p0 bar.sync 3, 64; // needed
@!%p0 ld.shared.b32 %r5, [%r4];
""",
    ),
    Case(
        "mbarrier_wait",
        r"data race|read of uninitialised",
        INIT
        + """
@%p0 st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff;
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
@%p0 bra OUT;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0; // needed
@!%p7 bra W1; // needed
ld.shared.b32 %r5, [%r4];
OUT: bar.sync 0;
""",
    ),
    Case(
        "mbarrier_of_an_earlier_phase",
        r"data race \(read after write\)",
        INIT
        + """
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
bar.sync 0;
@%p0 st.shared.b32 [%r4], %r2;
bar.warp.sync 0xffffffff;
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
@%p0 bra OUT;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 1; // needed
@!%p7 bra W1; // needed
ld.shared.b32 %r5, [%r4];
OUT: bar.sync 0;
""",
    ),
    Case(
        "relaxed_arrive",
        r"data race \(read after write\)",
        INIT
        + """
@%p0 st.shared.b32 [%r4], %r2;
@%p0 fence.acq_rel.cluster; // needed
@%p1 mbarrier.arrive.relaxed.cluster.shared::cta.b64 %d1, [mem + 4096];
@%p0 bra OUT;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
ld.shared.b32 %r5, [%r4];
OUT: ret;
""",
    ),
    Case(
        "mbarrier_init",
        r"use of an mbarrier that is not ordered after its mbarrier.init",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
bar.sync 0; // needed
setp.eq.u32 %p2, %r0, 32;
@%p2 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
""",
    ),
    Case(
        "shared_atomics",
        r"data race",
        """
mov.u32 %r5, 0;
@%p1 st.shared.b32 [%r3], %r5;
bar.sync 0;
red.shared.add.u32 [%r3], 1;
bar.sync 0; // needed
@!%p0 ld.shared.u32 %r6, [%r3];
""",
    ),
    Case(
        "cluster_barrier",
        r"data race|read of uninitialised",
        """
mapa.shared::cluster.u32 %r5, %r4, 1;
mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p2, %r6, 0;
barrier.cluster.arrive;
barrier.cluster.wait;
@%p2 st.shared::cluster.b32 [%r5], %r2;
barrier.cluster.arrive;
// wrong:@!%p2 ld.shared.b32 %r7, [%r4];
barrier.cluster.wait;
@!%p2 ld.shared.b32 %r7, [%r4];
""",
        block=32,
        grid=2,
        cluster=2,
    ),
    Case(
        "relaxed_cluster_barrier",
        r"data race \(read after write\)",
        """
mapa.shared::cluster.u32 %r5, %r4, 1;
mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p2, %r6, 0;
barrier.cluster.arrive;
barrier.cluster.wait;
@%p2 st.shared::cluster.b32 [%r5], %r2;
fence.acq_rel.cluster; // needed
barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
@!%p2 ld.shared.b32 %r7, [%r4];
barrier.cluster.arrive;
barrier.cluster.wait;
""",
        block=32,
        grid=2,
        cluster=2,
    ),
    Case(
        "exit_before_a_neighbour_has_read",
        r"a CTA exits before this access|access to the memory of a CTA that has exited",
        """
mapa.shared::cluster.u32 %r5, %r4, 1;
mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p2, %r6, 0;
st.shared.b32 [%r4], %r2;
barrier.cluster.arrive;
barrier.cluster.wait;
@%p2 ld.shared::cluster.b32 %r7, [%r5];
barrier.cluster.arrive; // needed
barrier.cluster.wait; // needed
""",
        block=32,
        grid=2,
        cluster=2,
    ),
]


@parametrize(CASES)
def test_case(case: Case) -> None:
    assert_case(case)


def test_a_report_says_where():
    body = """
.loc 1 42 0
@%p0 st.shared.b32 [%r4], %r2;
.loc 1 43 0
@!%p0 ld.shared.b32 %r5, [%r4];
"""
    (report,) = reports(body, block=64, target="sm_100a")
    first, here, by, earlier, of, seen = report.splitlines()
    assert first.startswith("data race (read after write), kernel k, shared memory of CTA (0,0,0) at offset 0x")
    assert "ld.shared.b32 %r5, [%r4]" in here and here.endswith("[kernel.py:43]")
    assert "st.shared.b32 [%r4], %r2" in earlier and earlier.endswith("[kernel.py:42]")
    assert by.strip() == "by warp 1 of CTA (0,0,0)" and of.strip() == "by warp 0 of CTA (0,0,0)"
    assert seen.strip() == "seen 1 time"


def test_a_pair_is_reported_once_with_its_count():
    body = """
mov.u32 %r10, 0;
AGAIN: bar.sync 0;
@!%p0 st.shared.b32 [%r4], %r10;
@%p0 ld.shared.b32 %r5, [%r4];
add.u32 %r10, %r10, 1;
setp.lt.u32 %p2, %r10, 5;
@%p2 bra AGAIN;
"""
    found = reports("@!%p0 st.shared.b32 [%r4], %r4;\n" + body, block=64)
    assert len(found) == 2
    assert sum(int(r.splitlines()[-1].split()[1]) for r in found) == 5  # one of the two in every round
