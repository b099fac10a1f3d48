"""Scheduling: branches, convergence, barriers, clusters, spinning, deadlocks, limits, printf (PTX ISA 9.7.12, .13)."""

from __future__ import annotations

import numpy as np
import pytest

from torch_attnkit.sim import _ptx

from .snippet import kernel, run

pytestmark = pytest.mark.simulator
OUT = "mad.wide.u32 %d0, %tid, 4, %in0; st.global.b32 [%d0], %r0;"


def test_loops_of_different_length() -> None:
    """Collatz lengths: every lane leaves its loop at its own time."""
    out = np.zeros(64, np.uint32)
    run(
        f"""
    add.u32 %r1, %tid, 1; mov.u32 %r0, 0;
    LOOP: setp.eq.u32 %p0, %r1, 1; @%p0 bra DONE;
    and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
    mad.lo.u32 %r1, %r1, 3, 1; bra.uni NEXT;
    EVEN: shr.u32 %r1, %r1, 1;
    NEXT: add.u32 %r0, %r0, 1; bra LOOP;
    DONE: {OUT}""",
        out,
        block=64,
    )

    def collatz(n: int) -> int:
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps

    assert out.tolist() == [collatz(i + 1) for i in range(64)]


def test_brx() -> None:
    out = np.zeros(32, np.uint32)
    run(
        f"""
    and.b32 %r1, %tid, 3;
    TABLE: .branchtargets A, B, C, D;
    brx.idx %r1, TABLE;
    A: mov.u32 %r0, 10; bra OUT;
    B: mov.u32 %r0, 20; bra OUT;
    C: mov.u32 %r0, 30; bra OUT;
    D: mov.u32 %r0, 40;
    OUT: {OUT}""",
        out,
    )
    assert out.tolist() == [10, 20, 30, 40] * 8
    with pytest.raises(_ptx.PtxError, match="branch index 2 of 2 targets"):
        run("TABLE: .branchtargets A, B; mov.u32 %r1, 2; brx.idx %r1, TABLE; A: exit; B: exit;")


def test_scopes_of_inline_assembly() -> None:
    """Blocks have registers and labels of their own, twice the same ones."""
    out = np.zeros(32, np.uint32)
    block = """{ .reg .pred q; .reg .b32 %r0; mov.u32 %r0, %tid;
    AGAIN: setp.lt.u32 q, %r0, 40; @!q bra OVER; add.u32 %r0, %r0, 7; bra AGAIN; OVER: add.u32 %r9, %r9, %r0; }"""
    run(f"mov.u32 %r9, 0; mov.u32 %r0, 1; {block} {block} add.u32 %r0, %r0, %r9; {OUT}", out)
    last = lambda i: i + -(-(40 - i) // 7) * 7
    assert out.tolist() == [2 * last(i) + 1 for i in range(32)]


def test_an_elected_lane_may_wait_while_the_others_go_on() -> None:
    """Lane 0 spins on a flag that lane 31 sets further down: forward progress of diverged lanes (PTX ISA 3.2)."""
    out, flag = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    run(
        f"""
    setp.ne.u32 %p0, %tid, 0; @%p0 bra REST;
    SPIN: ld.relaxed.gpu.global.u32 %r1, [%in1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN; bra JOIN;
    REST: setp.ne.u32 %p2, %tid, 31; @%p2 bra JOIN; mov.u32 %r1, 5; st.relaxed.gpu.global.u32 [%in1], %r1;
    JOIN: bar.warp.sync -1; ld.global.u32 %r0, [%in1]; {OUT}""",
        out,
        flag,
    )
    assert (out == 5).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clusters_that_spin_on_one_another_are_scheduled_together(seed: int) -> None:
    """A chain through all CTAs, against the order in which they start; atomics count how many are through."""
    n = 20
    flags, out = np.zeros(n + 1, np.uint32), np.zeros(n, np.uint32)
    flags[n] = 1
    run(
        """
    mov.u32 %r0, %ctaid.x; mad.wide.u32 %d0, %r0, 4, %in0; mad.wide.u32 %d1, %r0, 4, %in1;
    SPIN: ld.acquire.gpu.global.u32 %r1, [%d0+4]; setp.eq.u32 %p0, %r1, 0; @%p0 bra SPIN;
    add.u32 %r1, %r1, 1; st.global.u32 [%d1], %r1; st.release.gpu.global.u32 [%d0], %r1;""",
        flags,
        out,
        grid=n,
        block=1,
        seed=seed,
        limit=200_000_000,
    )
    assert out.tolist() == list(range(n + 1, 1, -1))


def test_spinning_across_threads_of_the_machine() -> None:
    n = 6
    flags = np.zeros(n + 1, np.uint32)
    flags[n] = 1
    run(
        """
    mov.u32 %r0, %ctaid.x; mad.wide.u32 %d0, %r0, 4, %in0;
    SPIN: atom.acquire.gpu.global.or.b32 %r1, [%d0+4], 0; setp.eq.u32 %p0, %r1, 0; @%p0 bra SPIN;
    add.u32 %r1, %r1, 1; st.release.gpu.global.u32 [%d0], %r1;""",
        flags,
        grid=n,
        block=1,
        threads=3,
        limit=500_000_000,
    )
    assert flags.tolist() == list(range(n + 1, 0, -1))


# --- barriers


@pytest.mark.parametrize(
    "form", ["bar.sync 0", "barrier.sync 0", "barrier.cta.sync.aligned 3", "bar.sync 2, 128", "barrier.sync %r9, 128"]
)
def test_barriers_order_shared_memory(form: str) -> None:
    out = np.zeros(128, np.uint32)
    run(
        f"""
    mov.u32 %r9, 7; mov.u32 %r1, smem; mad.lo.u32 %r2, %tid, 4, %r1; st.shared.u32 [%r2], %tid;
    {form}; xor.b32 %r3, %tid, 127; mad.lo.u32 %r2, %r3, 4, %r1; ld.shared.u32 %r0, [%r2]; {OUT}""",
        out,
        block=128,
        shared=512,
        seed=3,
    )
    assert out.tolist() == list(range(127, -1, -1))


def test_producer_and_consumer() -> None:
    """Warps 0 and 1 arrive without waiting, warp 2 waits for all three (PTX ISA 9.7.13.1)."""
    out = np.zeros(1, np.uint32)
    run(
        """
    shr.u32 %r1, %tid, 5; setp.eq.u32 %p0, %r1, 2; @%p0 bra CONSUMER;
    red.shared.add.u32 [smem], 1; barrier.arrive 1, 96; exit;
    CONSUMER: bar.sync 1, 96; ld.shared.u32 %r0, [smem]; st.global.u32 [%in0], %r0;""",
        out,
        block=96,
        shared=16,
        poison=False,
        seed=5,
    )
    assert out[0] == 64


def test_reductions_of_barriers() -> None:
    out = np.zeros((64, 3), np.uint32)
    run(
        """
    setp.lt.u32 %p0, %tid, 40;
    bar.red.popc.u32 %r0, 0, %p0; barrier.red.and.pred %p1, 1, 64, %p0; barrier.cta.red.or.aligned.pred %p2, 2, !%p0;
    selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 1, 0, %p2; mad.wide.u32 %d0, %tid, 12, %in0;
    st.global.u32 [%d0], %r0; st.global.u32 [%d0+4], %r1; st.global.u32 [%d0+8], %r2;""",
        out,
        block=64,
    )
    assert (out == [40, 0, 1]).all()


def test_warps_that_exited_are_not_waited_for() -> None:
    out = np.zeros(64, np.uint32)
    run(f"setp.lt.u32 %p0, %tid, 32; @%p0 exit; bar.sync 0; mov.u32 %r0, 1; {OUT}", out, block=64)
    assert out.tolist() == [0] * 32 + [1] * 32


@pytest.mark.parametrize(
    "form", [("arrive", "wait"), ("arrive.aligned", "wait.aligned"), ("arrive.release.aligned", "wait.acquire.aligned")]
)
@pytest.mark.parametrize("seed", [0, 4])
def test_cluster_barriers(form: tuple[str, str], seed: int) -> None:
    """Three rounds: each CTA writes to its neighbour's shared memory, all wait, each reads what it got."""
    out = np.zeros((4, 3), np.uint32)
    sync = f"barrier.cluster.{form[0]}; barrier.cluster.{form[1]};"
    step = lambda i: (
        f"add.u32 %r5, %r0, {i * 10}; @%p0 st.shared::cluster.u32 [%r4], %r5; {sync}"
        f"ld.shared.u32 %r6, [smem]; @%p0 st.global.u32 [%d0+{4 * i}], %r6; {sync}"
    )
    run(
        f"""
    mov.u32 %r0, %cluster_ctarank; add.u32 %r1, %r0, 1; and.b32 %r1, %r1, 3; mov.u32 %r3, smem;
    mapa.shared::cluster.u32 %r4, %r3, %r1;
    setp.eq.u32 %p0, %tid, 0; mad.wide.u32 %d0, %r0, 12, %in0; {step(0)} {step(1)} {step(2)}""",
        out,
        grid=4,
        cluster=4,
        block=64,
        shared=64,
        seed=seed,
    )
    assert out.tolist() == [[(r - 1) % 4 + 10 * i for i in range(3)] for r in range(4)]


FENCES = [
    "fence.acq_rel.gpu",
    "fence.sc.sys",
    "fence.acquire.cta",
    "fence.release.cluster",
    "fence.cta",
    "fence.acquire.sync_restrict::shared::cluster.cluster",
    "fence.release.sync_restrict::shared::cta.cluster",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.alias",
    "fence.proxy.async",
    "fence.proxy.async.global",
    "fence.proxy.async.shared::cta",
    "fence.proxy.async.shared::cluster",
    "fence.proxy.tensormap::generic.release.gpu",
    "fence.proxy.tensormap::generic.acquire.sys [%in0], 128",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
    "membar.cta",
    "membar.gl",
    "membar.sys",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "nanosleep.u32 100",
    "pmevent 3",
    "setmaxnreg.inc.sync.aligned.u32 240",
    "setmaxnreg.dec.sync.aligned.u32 24",
]


@pytest.mark.parametrize("form", FENCES)
def test_what_changes_no_value(form: str) -> None:
    out = np.zeros(32, np.uint32)
    run(f"{form}; add.u32 %r0, %tid, 1; {OUT}", out)
    assert out.tolist() == list(range(1, 33))


# --- what goes wrong


DEADLOCKS = {
    "barrier 1: 32 threads have arrived, 64 are expected": ("bar.sync 1, 64;", {}),
    "waits for lanes 0xffffffff to converge, has 0xffff": (
        "setp.lt.u32 %p0, %tid, 16; @%p0 bra A; B: bar.warp.sync -1; exit; A: bar.warp.sync -1;",
        {},
    ),
    "barrier.cluster: 1 warps have arrived": (
        "mov.u32 %r0, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0; @%p0 bra B; bar.sync 3, 64; exit;"
        "B: barrier.cluster.arrive; barrier.cluster.wait;",
        {"grid": 2, "cluster": 2},
    ),
}


@pytest.mark.parametrize("message", list(DEADLOCKS))
def test_deadlocks_name_what_each_warp_waits_for(message: str) -> None:
    body, options = DEADLOCKS[message]
    with pytest.raises(_ptx.PtxDeadlock, match="deadlock in cluster 0") as e:
        run(body, **options)
    assert message in str(e.value) and "warp 0 lanes 0x" in str(e.value) and "line" in str(e.value)
    assert isinstance(e.value, _ptx.PtxError) and isinstance(e.value, RuntimeError)


MISUSE = {
    "barrier 16; there are 0 to 15": "mov.u32 %r0, 16; bar.sync %r0;",
    "whole warps are expected": "bar.sync 1, 48;",
    "is in use with 64 threads, this arrival says 96": """shr.u32 %r1, %tid, 5; setp.eq.u32 %p0, %r1, 0; @%p0 bra A;
    bar.sync 1, 96; exit; A: bar.sync 1, 64;""",
    "barrier.cluster.arrive twice": "barrier.cluster.arrive; barrier.cluster.arrive;",
    "barrier.cluster.wait without an arrive": "barrier.cluster.wait;",
    "the kernel trapped": "brkpt;",
}


@pytest.mark.parametrize("message", list(MISUSE))
def test_misuse(message: str) -> None:
    with pytest.raises(_ptx.PtxError, match=message):
        run(MISUSE[message], block=96, grid=2, cluster=2)


def test_endless_launches_end_at_their_limit() -> None:
    with pytest.raises(_ptx.PtxError, match="more than 100000 warp instructions"):
        run("A: bra A;", limit=100_000)


def test_a_kernel_without_an_end_is_refused() -> None:
    text = kernel("bra X; X: mov.u32 %r0, 0;", 0).replace("  ret;", "")
    with pytest.raises(_ptx.PtxError, match="lanes run past the last instruction"):
        _ptx.Module(text).kernel("snippet").launch(grid=(1,), block=(1,))


SHAPES = [
    (dict(block=(0,)), "a block of 0 threads"),
    (dict(block=(2048,)), "a block of 2048 threads"),
    (dict(block=(32,), cluster=(2,), grid=(3,)), "no multiple of the cluster's 2"),
    (dict(block=(32,), dynamic_shared=300_000), "a CTA has at most 227 KB"),
    (dict(block=(32,), ranges=[(0x1000, 0x2000, True, "a"), (0x1800, 0x3000, True, "b")]), "'a' and 'b' overlap"),
]


@pytest.mark.parametrize(("options", "message"), SHAPES)
def test_launches_that_hardware_refuses(options: dict, message: str) -> None:
    k = _ptx.Module(kernel("", 0)).kernel("snippet")
    with pytest.raises(_ptx.PtxError, match=message):
        k.launch(**{"grid": (1,), **options})


def test_a_target_whose_limits_are_not_known_is_refused() -> None:
    text = kernel("", 0, target="sm_70")
    with pytest.raises(_ptx.PtxError, match=r"limits of .target 'sm_70' are not known, accepted: sm_80, sm_86, sm_89,"):
        _ptx.Module(text).kernel("snippet").launch(grid=(1,), block=(32,))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_100f", "sm_103a"])
def test_all_of_a_targets_shared_memory_and_no_more(target: str) -> None:
    limits = _ptx.limits(target)
    assert (limits.shared, limits.shared_of_processor) == (227 << 10, 228 << 10)
    k = _ptx.Module(kernel("", 0, target=target)).kernel("snippet")
    k.launch(grid=(1,), block=(32,), dynamic_shared=limits.shared)
    with pytest.raises(_ptx.PtxError, match=f"at most 227 KB on {target[:-1]}"):
        k.launch(grid=(1,), block=(32,), dynamic_shared=limits.shared + 1)


def test_required_sizes() -> None:
    text = kernel("", 0).replace("snippet()", "snippet()\n.reqntid 64, 2, 1\n.minnctapersm 1")
    k = _ptx.Module(text).kernel("snippet")
    assert k.reqntid == (64, 2, 1)
    k.launch(grid=(1,), block=(64, 2))
    with pytest.raises(_ptx.PtxError, match=r"\.reqntid is 64, 2, 1, the block is 64, 1, 1"):
        k.launch(grid=(1,), block=(64,))
    with pytest.raises(_ptx.PtxError, match="parameters of 0 bytes, 8 are needed"):
        _ptx.Module(kernel("", 1)).kernel("snippet").launch(grid=(1,), block=(1,))


def test_removed_statements_are_skipped() -> None:
    out = np.zeros(32, np.uint32)
    body = f"mov.u32 %r0, 1; add.u32 %r0, %r0, 10; add.u32 %r0, %r0, 100; {OUT}"
    statements = [s[1] for s in _ptx.Module(kernel(body, 1)).kernel("snippet").statements]
    run(body, out, removed=[statements.index("add.u32 %r0, %r0, 10")])
    assert (out == 101).all()


PRINTF = f"""
.global .align 1 .b8 format[40] = {{{", ".join(map(str, b"lane %d %5.2f %llx %%%s" + bytes([10, 0])))}}};
.global .align 1 .b8 word[4] = {{97, 98, 99, 0}};
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
"""


def test_printf() -> None:
    r = run(
        """
    .local .align 8 .b8 depot[32];
    mov.u64 %d1, depot; cvta.local.u64 %d2, %d1;
    neg.s32 %r0, %tid; st.local.u32 [depot], %r0; mov.f64 %d3, 0d4004000000000000; st.local.f64 [depot+8], %d3;
    mov.u64 %d4, 0xABCDEF0123; st.local.u64 [depot+16], %d4; mov.u64 %d5, word; cvta.global.u64 %d5, %d5;
    st.local.u64 [depot+24], %d5;
    mov.u64 %d6, format; cvta.global.u64 %d7, %d6;
    setp.lt.u32 %p0, %tid, 3; @!%p0 bra OUT;
    { .param .b64 param0; st.param.b64 [param0], %d7; .param .b64 param1; st.param.b64 [param1], %d2;
    .param .b32 retval0;
      call.uni (retval0), vprintf, (param0, param1); ld.param.b32 %r1, [retval0]; }
    OUT:""",
        module=PRINTF,
    )
    assert r.printed == [f"lane {-i}  2.50 abcdef0123 %abc\n" for i in range(3)]


def test_counters() -> None:
    r = run("setp.lt.u32 %p0, %tid, 32; @!%p0 bra OUT; add.u32 %r0, %tid, 1; add.u32 %r0, %r0, 1; OUT:", block=64)
    c = r.counters
    assert c["by_opcode"] == {"mov": 2, "setp": 2, "bra": 2, "add": 2, "ret": 2} and c["instructions"] == 10
    assert c["by_class"]["integer"] == 4 and c["by_warp"] == [6, 4] and c["executed"] == [2, 2, 2, 1, 1, 2]
