"""mbarrier (PTX ISA 9.7.13.15), form by form: counts, phases, transactions, states, remote arrivals, misuse."""

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxDeadlock, PtxError

from .snippet import run

pytestmark = pytest.mark.simulator

HEAD = """
.shared .align 8 .b64 mb[8];
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
mad.wide.u32 %d15, %r0, 4, %in0;
"""
SEEDS = [0, 1, 2, 3, 4, 5]


def results(body, block=32, **options):
    """Runs `body`, which stores one u32 a thread at %d15, and returns what the threads stored."""
    out = np.full(block * options.pop("per_thread", 1), 0xDEAD, np.uint32)
    run(HEAD + body, out, block=block, **options)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_arrive_and_test_wait_by_state(seed):
    out = results(
        """
        @%p0 mbarrier.init.shared::cta.b64 [mb], 64;
        bar.sync 0;
        mbarrier.arrive.shared::cta.b64 %d0, [mb];
        WAIT: mbarrier.test_wait.shared::cta.b64 %p1, [mb], %d0;
        @!%p1 bra WAIT;
        mbarrier.test_wait.shared.b64 %p2, [mb], %d0;
        selp.u32 %r1, 1, 0, %p2;
        st.global.u32 [%d15], %r1;
        """,
        block=64,
        seed=seed,
    )
    assert (out == 1).all()


def test_test_wait_is_false_before_the_last_arrival():
    out = results("""
        @%p0 mbarrier.init.shared.b64 [mb], 33;
        bar.warp.sync 0xffffffff;
        mbarrier.arrive.shared.b64 %d0, [mb];
        mbarrier.test_wait.shared.b64 %p1, [mb], %d0;
        selp.u32 %r1, 1, 0, %p1;
        st.global.u32 [%d15], %r1;
        """)
    assert (out == 0).all()


def test_parity_over_five_rounds():
    # Thread 0 of warp 1 hands numbers to warp 0 through two barriers; one slot, so each side waits for the other.
    body = """
        .shared .align 4 .b32 slot;
        @%p0 mbarrier.init.shared.b64 [mb], 1;
        @%p0 mbarrier.init.shared.b64 [mb+8], 32;
        bar.sync 0;
        mov.u32 %r1, 0;          // round
        mov.u32 %r2, 0;          // sum
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra PRODUCE;
        CONSUME:
        and.b32 %r3, %r1, 1;
        FULL: mbarrier.try_wait.parity.shared.b64 %p2, [mb], %r3;
        @!%p2 bra FULL;
        ld.shared.u32 %r4, [slot];
        mad.lo.u32 %r2, %r2, 10, %r4;
        mbarrier.arrive.shared.b64 _, [mb+8];
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p3, %r1, 5;
        @%p3 bra CONSUME;
        st.global.u32 [%d15], %r2;
        ret;
        PRODUCE:
        setp.ne.u32 %p4, %r0, 32;
        @%p4 ret;
        AGAIN:
        add.u32 %r5, %r1, 1;
        st.shared.u32 [slot], %r5;
        mbarrier.arrive.shared.b64 _, [mb];
        and.b32 %r3, %r1, 1;
        EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [mb+8], %r3, 1000;
        @!%p2 bra EMPTY;
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p3, %r1, 5;
        @%p3 bra AGAIN;
        """
    for seed in SEEDS:
        out = results(body, block=64, seed=seed)
        assert (out[:32] == 12345).all(), seed


def test_initial_phase_parities():
    # Phase 0 is current: its parity is not complete, the one "before" it (parity 1) counts as complete.
    out = results("""
        @%p0 mbarrier.init.shared.b64 [mb], 1;
        bar.warp.sync 0xffffffff;
        mbarrier.test_wait.parity.shared.b64 %p1, [mb], 0;
        mbarrier.test_wait.parity.shared.b64 %p2, [mb], 1;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 2, 0, %p2;
        or.b32 %r1, %r1, %r2;
        st.global.u32 [%d15], %r1;
        """)
    assert (out == 2).all()


def test_counted_arrival_and_pending_count():
    out = results("""
        mov.u32 %r9, 7;
        @%p0 mbarrier.init.shared.b64 [mb], 10;
        @!%p0 bra DONE;
        mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d0, [mb], 2;
        mbarrier.pending_count.b64 %r1, %d0;             // 10: before the arrival
        mbarrier.arrive.release.cta.shared::cta.b64 %d1, [mb], %r9;
        mbarrier.pending_count.b64 %r2, %d1;             // 8
        mbarrier.arrive.shared.b64 %d2, [mb];            // completes
        mbarrier.pending_count.b64 %r3, %d2;             // 1
        mbarrier.test_wait.shared.b64 %p1, [mb], %d2;
        selp.u32 %r4, 1000, 0, %p1;
        mad.lo.u32 %r1, %r1, 100, %r4;
        mad.lo.u32 %r2, %r2, 10, %r3;
        add.u32 %r1, %r1, %r2;
        st.global.u32 [%d15], %r1;
        DONE: ret;
        """)
    assert out[0] == 10 * 100 + 1000 + 8 * 10 + 1


def test_arrive_drop_lowers_the_next_phases():
    out = results("""
        @%p0 mbarrier.init.shared.b64 [mb], 3;
        @!%p0 bra DONE;
        mbarrier.arrive_drop.shared.b64 %d0, [mb];
        mbarrier.arrive_drop.noComplete.shared.b64 %d1, [mb], 1;
        mbarrier.arrive.shared.b64 %d2, [mb];
        mbarrier.test_wait.parity.shared.b64 %p1, [mb], 0;   // 3 arrivals: phase 0 is over
        mbarrier.arrive.shared.b64 %d3, [mb];               // 1 expected now: phase 1, too
        mbarrier.test_wait.parity.shared.b64 %p2, [mb], 1;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 2, 0, %p2;
        or.b32 %r1, %r1, %r2;
        st.global.u32 [%d15], %r1;
        DONE: ret;
        """)
    assert out[0] == 3


def test_transactions_hold_the_phase():
    # The data may come before it is expected: the tx-count is then negative for a while.
    out = results("""
        @%p0 mbarrier.init.shared.b64 [mb], 1;
        @!%p0 bra DONE;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [mb], 48;
        mbarrier.test_wait.parity.shared.b64 %p1, [mb], 0;
        mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [mb], 64;
        mbarrier.test_wait.parity.shared.b64 %p2, [mb], 0;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [mb], 16;
        mbarrier.complete_tx.shared.b64 [mb], 16;
        mbarrier.test_wait.parity.shared.b64 %p3, [mb], 0;
        mbarrier.complete_tx.shared.b64 [mb], 16;
        mbarrier.test_wait.parity.shared.b64 %p4, [mb], 0;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 2, 0, %p2;
        selp.u32 %r3, 4, 0, %p3;
        selp.u32 %r4, 8, 0, %p4;
        or.b32 %r1, %r1, %r2; or.b32 %r1, %r1, %r3; or.b32 %r1, %r1, %r4;
        st.global.u32 [%d15], %r1;
        DONE: ret;
        """)
    assert out[0] == 8


def test_generic_addresses_and_inval():
    out = results("""
        cvta.shared.u64 %d1, mb;
        @!%p0 bra DONE;
        mbarrier.init.b64 [%d1+16], 1;
        mbarrier.arrive.b64 %d2, [%d1+16];
        mbarrier.test_wait.b64 %p1, [%d1+16], %d2;
        mbarrier.inval.b64 [%d1+16];
        mbarrier.init.b64 [%d1+16], 2;            // the memory may hold another one now
        mbarrier.test_wait.parity.acquire.cta.b64 %p2, [%d1+16], 0;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 2, 0, %p2;
        or.b32 %r1, %r1, %r2;
        st.global.u32 [%d15], %r1;
        DONE: ret;
        """)
    assert out[0] == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "scope", ["release.cluster.shared::cluster", "relaxed.cluster.shared::cluster", "shared::cluster"]
)
def test_remote_arrivals(scope, seed):
    # All threads of both CTAs arrive on rank 0's barrier; rank 0 waits. Then with expect_tx, from rank 1.
    out = np.zeros(2, np.uint32)
    run(
        HEAD
        + f"""
        mov.u32 %r1, mb;
        mapa.shared::cluster.u32 %r2, %r1, 0;
        mov.u32 %r3, %cluster_ctarank;
        @%p0 mbarrier.init.shared::cta.b64 [mb], 64;
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        mbarrier.arrive.{scope}.b64 _, [%r2];
        setp.ne.u32 %p1, %r3, 0;
        @%p1 bra END;
        WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [mb], 0;
        @!%p2 bra WAIT;
        @%p0 st.global.u32 [%in0], 7;
        END:
        barrier.cluster.arrive;
        barrier.cluster.wait;
        @!%p0 ret;
        setp.eq.u32 %p3, %r3, 0;
        @%p3 bra SECOND;
        mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r2], 32;
        mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r2], 32;
        mov.u32 %r4, 63;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2], %r4;
        ret;
        SECOND: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p4, [mb], 1;
        @!%p4 bra SECOND;
        st.global.u32 [%in0+4], 9;
        """,
        out,
        grid=2,
        cluster=2,
        seed=seed,
    )
    assert out.tolist() == [7, 9]


def test_a_look_ahead_may_fail_and_work_goes_on():
    # try_wait is asked once, for a phase that only this thread's own arrival completes: it must come back false.
    out = results("""
        @%p0 mbarrier.init.shared.b64 [mb], 1;
        @!%p0 bra DONE;
        mbarrier.try_wait.parity.shared.b64 %p1, [mb], 0;
        mbarrier.arrive.shared.b64 _, [mb];
        mbarrier.try_wait.parity.shared.b64 %p2, [mb], 0;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 2, 0, %p2;
        or.b32 %r1, %r1, %r2;
        st.global.u32 [%d15], %r1;
        DONE: ret;
        """)
    assert out[0] == 2


def test_lanes_waiting_for_different_barriers():
    # Lane 0's barrier is complete; it must get on and complete lane 1's.
    out = results("""
        setp.lt.u32 %p1, %r0, 2;
        @!%p1 bra DONE;
        mov.u32 %r1, mb;
        mad.lo.u32 %r1, %r0, 8, %r1;
        mbarrier.init.shared.b64 [%r1], 1;
        @%p0 mbarrier.arrive.shared.b64 _, [mb];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
        @!%p2 bra WAIT;
        @%p0 mbarrier.arrive.shared.b64 _, [mb+8];
        st.global.u32 [%d15], 5;
        DONE: ret;
        """)
    assert out[:2].tolist() == [5, 5]


MISUSE = {
    "not initialised": ("mbarrier.arrive.shared.b64 _, [mb];", "before mbarrier.init"),
    "after inval": (
        "mbarrier.init.shared.b64 [mb], 1; mbarrier.inval.shared.b64 [mb]; mbarrier.expect_tx.shared.b64 [mb], 4;",
        "before mbarrier.init",
    ),
    "one arrival too many": (
        "mbarrier.init.shared.b64 [mb], 2; mbarrier.expect_tx.shared.b64 [mb], 16;"
        "mbarrier.arrive.shared.b64 _, [mb], 2; mbarrier.arrive.shared.b64 _, [mb];",
        "gets 1 arrivals when 0 of 2 are pending",
    ),
    "too large a count": (
        "mbarrier.init.shared.b64 [mb], 2; mbarrier.arrive.shared.b64 _, [mb], 3;",
        "gets 3 arrivals when 2 of 2",
    ),
    "count zero": ("mbarrier.init.shared.b64 [mb], 0;", "accepted are 1 to 2\\^20 - 1"),
    "tx overflow": (
        "mbarrier.init.shared.b64 [mb], 1; mbarrier.expect_tx.shared.b64 [mb], 1048575;"
        "mbarrier.expect_tx.shared.b64 [mb], 1;",
        "tx-count became 1048576",
    ),
    "tx underflow": (
        "mbarrier.init.shared.b64 [mb], 1; mbarrier.complete_tx.shared.b64 [mb], 1048576;",
        "tx-count became -1048576",
    ),
    "alignment": ("mbarrier.init.shared.b64 [mb+4], 1;", "not aligned to 8"),
    "outside": ("mov.u32 %r1, 0x3f000; mbarrier.init.shared.b64 [%r1], 1;", "outside the CTA's shared memory"),
    "initialised while in use": (
        "mbarrier.init.shared.b64 [mb], 2; mbarrier.arrive.shared.b64 _, [mb]; mbarrier.init.shared.b64 [mb], 2;",
        "initialised again",
    ),
    "noComplete completes": (
        "mbarrier.init.shared.b64 [mb], 2; mbarrier.arrive.noComplete.shared.b64 %d0, [mb], 2;",
        "would complete phase 0",
    ),
    "parity": (
        "mbarrier.init.shared.b64 [mb], 2; mbarrier.test_wait.parity.shared.b64 %p1, [mb], 2;",
        "phaseParity is 2",
    ),
    "a state of long ago": (
        "mbarrier.init.shared.b64 [mb], 1; mbarrier.arrive.shared.b64 %d0, [mb]; mbarrier.arrive.shared.b64 _, [mb];"
        "mbarrier.test_wait.shared.b64 %p1, [mb], %d0;",
        "asked for phase 0 when it is in phase 2",
    ),
    "a generic address elsewhere": ("mbarrier.init.b64 [%in0], 1;", "not in shared memory"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name):
    body, message = MISUSE[name]
    with pytest.raises(PtxError, match=message):
        results(f"@!%p0 ret; {body}")


def test_remote_states_are_refused():
    with pytest.raises(PtxError, match="cannot return a state"):
        results(
            """
            mov.u32 %r1, mb;
            mov.u32 %r2, %cluster_ctarank;
            xor.b32 %r2, %r2, 1;
            mapa.shared::cluster.u32 %r1, %r1, %r2;
            @%p0 mbarrier.init.shared.b64 [mb], 32;
            barrier.cluster.arrive;
            barrier.cluster.wait;
            mbarrier.arrive.shared::cluster.b64 %d0, [%r1];
            """,
            grid=2,
            cluster=2,
        )


def test_waiting_for_ever_is_a_deadlock_with_the_barrier_in_it():
    with pytest.raises(PtxDeadlock, match=r"parity 0: 2 arrivals and 64 bytes still expected"):
        results("""
            @%p0 mbarrier.init.shared.b64 [mb], 2;
            @%p0 mbarrier.expect_tx.shared.b64 [mb], 64;
            bar.warp.sync 0xffffffff;
            WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [mb], 0;
            @!%p1 bra WAIT;
            """)


@pytest.mark.parametrize(
    "form",
    [
        "mbarrier.arrive.release.shared.b64 _, [mb];",
        "mbarrier.arrive.expect_tx.noComplete.shared.b64 _, [mb], 1;",
        "mbarrier.init.shared::cluster.b64 [mb], 1;",
        "mbarrier.test_wait.parity.shared::cluster.b64 %p1, [mb], 0;",
        "mbarrier.frobnicate.shared.b64 [mb];",
        "mbarrier.arrive.shared _, [mb];",
    ],
)
def test_forms_that_do_not_exist(form):
    with pytest.raises(PtxError, match="line"):
        results(form)
