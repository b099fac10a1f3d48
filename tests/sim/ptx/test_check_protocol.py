"""The checker on rules that are not about one access after another: waits that nobody looks at, mbarriers overwritten,
CTAs that have not begun, registers, read-only data; and on waived findings."""

from __future__ import annotations

import pytest

from torch_attnkit.sim import _ptx

from .checked import Case, assert_case, dropped, launch, parametrize, reports
from .snippet import run

pytestmark = pytest.mark.simulator

PEER = """
mapa.shared::cluster.u32 %r5, %r4, 1;
mov.u32 %r6, %cluster_ctarank;
setp.eq.u32 %p2, %r6, 0;
setp.ne.u32 %p3, %r6, 0;
"""
CLUSTER_SYNC = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
STARTED = "barrier.cluster.arrive; // needed\nbarrier.cluster.wait; // needed\n"
NOT_STARTED = r"access to the memory of a CTA that is not known to have started"
PEER_INIT = """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], {count};
@%p1 fence.mbarrier_init.release.cluster;
"""

CASES = [
    Case(
        "a_store_over_an_mbarrier",
        r"write over an mbarrier that is in use",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
bar.sync 0;
@%p1 mbarrier.inval.shared::cta.b64 [mem + 4096]; // needed
@%p1 st.shared.b32 [mem + 4100], %r2;
""",
    ),
    Case(
        "a_bulk_copy_over_an_mbarrier",
        r"write over an mbarrier that is in use",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
@%p1 mbarrier.init.shared::cta.b64 [mem + 128], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.inval.shared::cta.b64 [mem + 128]; // needed
@%p1 fence.proxy.async;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 256;
@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [mem], [%in0], 256, [mem + 4096];
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
""",
        arrays=(256,),
    ),
    Case(
        "a_store_into_a_cta_before_it_has_started",
        NOT_STARTED,
        PEER + STARTED + "@%p2 st.shared::cluster.b32 [%r5], %r2;\n" + CLUSTER_SYNC,
        block=32,
        grid=2,
        cluster=2,
    ),
    Case(
        "a_relaxed_barrier_shows_that_a_cta_has_started",
        NOT_STARTED,
        PEER
        + "barrier.cluster.arrive.relaxed; // needed\nbarrier.cluster.wait; // needed\n"
        + "@%p2 st.shared::cluster.b32 [%r5], %r2;\n"
        + CLUSTER_SYNC,
        block=32,
        grid=2,
        cluster=2,
    ),
    Case(
        "an_arrival_in_a_cta_before_it_has_started",
        NOT_STARTED + r"|use of an mbarrier that is not ordered|missing fence.mbarrier_init",
        PEER
        + PEER_INIT.format(count=1)
        + STARTED
        + """
setp.eq.and.u32 %p4, %r0, 0, %p3;
mapa.shared::cluster.u32 %r7, %r3, 0;
@%p4 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7 + 4096];
@%p3 bra END;
W1: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
END:
"""
        + CLUSTER_SYNC,
        block=32,
        grid=2,
        cluster=2,
    ),
    Case(
        "a_multicast_to_a_cta_before_it_has_started",
        NOT_STARTED + r"|use of an mbarrier that is not ordered|missing fence.mbarrier_init",
        PEER
        + PEER_INIT.format(count=1)
        + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 128;\n"
        + STARTED
        + """
setp.eq.and.u32 %p4, %r0, 0, %p3;
mov.u16 %h1, 3;
@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [mem], [%in0], 128,
  [mem + 4096], %h1;
W1: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
"""
        + CLUSTER_SYNC,
        block=32,
        grid=2,
        cluster=2,
        arrays=(128,),
    ),
    Case(
        "a_load_of_an_mbarrier",
        r"read of an mbarrier that is in use, as if it were data",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
bar.sync 0;
@%p1 mbarrier.inval.shared::cta.b64 [mem + 4096]; // needed
@%p1 ld.shared.b64 %d1, [mem + 4096];
""",
    ),
    Case(
        "a_bulk_copy_of_an_mbarrier",
        r"read of an mbarrier that is in use, as if it were data",
        """
@%p0 st.shared.b32 [%r4 + 4096], %r2;
fence.proxy.async.shared::cta;
bar.sync 0;
// wrong:@%p1 mbarrier.init.shared::cta.b64 [mem + 4160], 1;
@%p1 fence.proxy.async.shared::cta;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%in0], [mem + 4096], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
""",
        arrays=(128,),
    ),
    Case(
        "read_only_data_that_the_kernel_writes",
        r"ld.global.nc of data that the kernel has written",
        """
mul.wide.u32 %d1, %r2, 4;
add.u64 %d1, %in0, %d1;
@%p0 st.global.b32 [%d1], %r2;
bar.sync 0;
add.u64 %d1, %d1, 128; // needed
ld.global.nc.b32 %r6, [%d1];
""",
        arrays=(256,),
    ),
    Case(
        "setmaxnreg_by_one_warp",
        r"setmaxnreg by a part of a warpgroup",
        """
setp.lt.u32 %p2, %r1, 4;
// wrong:setp.lt.u32 %p2, %r1, 1;
@%p2 setmaxnreg.dec.sync.aligned.u32 40;
bar.sync 0;
""",
        block=256,
    ),
    Case(
        "two_setmaxnreg",
        r"two setmaxnreg between which the warps of a warpgroup do not synchronise",
        """
setmaxnreg.dec.sync.aligned.u32 64;
bar.sync 1, 128; // needed
setmaxnreg.dec.sync.aligned.u32 40;
""",
        block=128,
    ),
    Case(
        "two_setmaxnreg_and_an_mbarrier",
        r"two setmaxnreg between which the warps of a warpgroup do not synchronise",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 4;
setp.eq.u32 %p2, %r2, 0;
bar.sync 0;
setmaxnreg.dec.sync.aligned.u32 64;
@%p2 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0; // needed
@!%p7 bra W1; // needed
setmaxnreg.dec.sync.aligned.u32 40;
bar.sync 0;
""",
        block=128,
    ),
]


@parametrize(CASES)
def test_case(case: Case) -> None:
    assert_case(case)


UNUSED = """
mul.lo.u32 %r5, %r2, 16;
add.u32 %r5, %r5, %r3;
st.shared.b32 [%r5], %r2;
st.shared.b32 [%r5 + 4], %r2;
st.shared.b32 [%r5 + 8], %r2;
ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r5];
add.u32 %r10, %r6, %r7;
add.u32 %r10, %r10, %r8;
"""


@pytest.mark.parametrize("use", ["", "and.b32 %r11, %r9, 7;\nmov.u32 %r12, %r11;"])
def test_a_register_of_a_wide_load_that_nothing_depends_on(use: str) -> None:
    assert reports(UNUSED + use, block=32) == []


@pytest.mark.parametrize(
    "use",
    [
        "st.shared.b32 [%r5], %r9;",
        "setp.eq.u32 %p2, %r9, 0;\n@%p2 bra END;\nEND:",
        "and.b32 %r11, %r9, 7;\nmov.u32 %r12, %r11;\nst.shared.b32 [%r5], %r12;",
        "mov.u32 %r11, 0;\nmul.lo.u32 %r9, %r9, %r11;\nadd.u32 %r12, %r5, %r9;\nld.shared.b32 %r13, [%r12];",
    ],
)
def test_a_register_of_a_wide_load_that_is_used(use: str) -> None:
    (report,) = reports(UNUSED + use, block=32)
    assert report.startswith("read of uninitialised memory") and "ld.shared.v4" in report


IGNORED = """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
bar.sync 0;
@%p0 st.shared.b32 [%r4], %r2;
@%p0 bar.warp.sync 0xffffffff;
@%p1 mbarrier.arrive.shared::cta.b64 %d1, [mem + 4096];
@%p0 bra OUT;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1; // needed
ld.shared.b32 %r5, [%r4];
OUT: bar.sync 0;
"""


def test_a_wait_whose_answer_is_ignored_shows_under_a_hostile_schedule() -> None:
    seeds = range(1, 33)
    assert all(reports(IGNORED, block=64, seed=seed) == [] for seed in seeds)
    found = [r for seed in seeds for r in reports(dropped(IGNORED), block=64, seed=seed)]
    assert found and all("uninitialised" in r or "data race" in r for r in found)


def test_setmaxnreg_waits_for_registers_of_the_file() -> None:
    """Three warpgroups have 168 registers a thread; two can have 240 when the third gives up all but 24."""
    body = """
mov.u32 %r0, %tid;
shr.u32 %r1, %r0, 7;
setp.eq.u32 %p0, %r1, 0;
@%p0 bra FEW;
setmaxnreg.inc.sync.aligned.u32 {most};
bra OUT;
FEW: setmaxnreg.dec.sync.aligned.u32 24;
OUT: bar.sync 0;
"""
    for check in (False, True):
        run(body.replace("{most}", "240"), block=384, check=check)
        with pytest.raises(_ptx.PtxDeadlock, match="setmaxnreg to 248: the other warps hold"):
            run(body.replace("{most}", "248"), block=384, check=check)


def test_setmaxnreg_goes_the_way_that_it_says() -> None:
    body = "setmaxnreg.dec.sync.aligned.u32 64;\nbar.sync 0;\nsetmaxnreg.{how}.sync.aligned.u32 {to};"
    for how, to, wrong in (("inc", 40, True), ("dec", 80, True), ("inc", 80, False), ("dec", 64, False)):
        text = body.format(how=how, to=to)
        if wrong:
            with pytest.raises(
                _ptx.PtxError, match=f"setmaxnreg.{how} to {to} by a warp whose threads have 64 registers"
            ):
                run(text, block=128)
        else:
            run(text, block=128)


WAIVED = "@%p0 st.shared.b32 [%r4], %r2;\n@!%p0 st.shared.b32 [%r4], %r0;\n@!%p0 ld.shared.b32 %r5, [%r4 + 128];"


def test_a_waived_finding_is_a_note_that_says_so() -> None:
    def found(*waive: str) -> list[str]:
        return [r.splitlines()[0] for r in launch(WAIVED, block=64, waive=waive).reports]

    assert [r.split(",")[0] for r in found()] == ["data race (write after write)", "read of uninitialised memory"]
    first, loud, waived = found("write_after_write")
    assert first == "note: waived: write_after_write (seen 1 time)"
    assert loud.startswith("read of uninitialised memory")
    assert waived.startswith("note: waived: data race (write after write), kernel k")
    assert all(r.startswith("note: ") for r in found("write_after_write", "uninitialised"))
    assert found("exited", "uninitialised")[0] == "note: waived: uninitialised (seen 1 time), exited (seen 0 times)"


def test_unknown_findings_are_refused() -> None:
    for option in ("waive", "strict"):
        with pytest.raises(
            _ptx.PtxError, match=f"{option}: no finding is called 'races', accepted: read_after_write, "
        ):
            launch(WAIVED, block=64, **{option: ("races",)})


def test_a_strict_run_raises_a_note() -> None:
    same = "mov.u32 %r5, 7;\nst.shared.b32 [mem], %r5;"
    (note,) = reports(same, block=64)
    assert note.startswith("note: data race that writes the value that is there")
    (finding,) = reports(same, block=64, strict=("same_value",))
    assert not finding.startswith("note: ")
