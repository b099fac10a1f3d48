"""Seeds are schedules: right kernels give one answer under all of them, wrong ones give themselves away under some."""

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxDeadlock

from torch_attnkit.sim import _ptx as machine

from .async_pieces import HEAD, aligned, move
from .snippet import run

pytestmark = pytest.mark.simulator
SEEDS = range(1, 25)
TILES = 12

# A ring of two stages: warp 0 loads 128 bytes a tile, warp 1 adds the tiles up. Barriers 0, 1: full; 2, 3: empty.
RING = f"""
    @%p0 mbarrier.init.shared.b64 [mb], 1;
    @%p0 mbarrier.init.shared.b64 [mb+8], 1;
    @%p0 mbarrier.init.shared.b64 [mb+16], 32;
    @%p0 mbarrier.init.shared.b64 [mb+24], 32;
    @%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mov.u32 %r1, 0;                       // tile
    mov.u32 %r2, 0;                       // sum
    setp.ge.u32 %p1, %r0, 32;
    STEP:
    and.b32 %r3, %r1, 1;                  // stage
    shr.u32 %r4, %r1, 1;
    and.b32 %r4, %r4, 1;                  // parity of its round
    mov.u32 %r5, mb;
    mad.lo.u32 %r5, %r3, 8, %r5;
    mov.u32 %r6, data;
    mad.lo.u32 %r6, %r3, 128, %r6;
    @%p1 bra CONSUME;
    @!%p0 ret;
    xor.b32 %r7, %r4, 1;
    EMPTY: mbarrier.try_wait.parity.shared.b64 %p2, [%r5+16], %r7;   // producer waits
    @!%p2 bra EMPTY;                                                 // producer waits
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 128;
    mul.lo.u32 %r8, %r1, 32;
    cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r6], [%in0, {{%r8}}], [%r5];
    bra NEXT;
    CONSUME:
    FULL: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], %r4;       // consumer waits
    @!%p3 bra FULL;                                                  // consumer waits
    sub.u32 %r9, %r0, 32;
    mad.lo.u32 %r10, %r9, 4, %r6;
    ld.shared.u32 %r11, [%r10];
    mad.lo.u32 %r2, %r2, 3, %r11;
    mbarrier.arrive.shared.b64 _, [%r5+16];
    NEXT:
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p4, %r1, {TILES};
    @%p4 bra STEP;
    @!%p1 ret;
    mad.wide.u32 %d1, %r9, 4, %in2;
    st.global.u32 [%d1], %r2;
    """


def ring(body, seed):
    memory, out = aligned(32 * TILES, np.uint32), aligned(32, np.uint32)
    memory[:] = np.random.default_rng(1).integers(0, 1000, memory.size)
    descriptor = aligned(128)
    code = machine.tensor_map_encode(2, memory.ctypes.data, [memory.size], [], [32], [1])
    descriptor[:] = np.frombuffer(code, np.uint8)
    run(HEAD + body, descriptor, memory, out, block=64, seed=seed)
    want = np.zeros(32, np.uint32)
    for tile in memory.reshape(TILES, 32):
        want = want * 3 + tile
    return (out == want).all()


def test_a_right_ring_is_right_under_every_schedule():
    assert all(ring(RING, seed) for seed in (0, *SEEDS))


def without(who):
    return "\n".join(line for line in RING.splitlines() if not line.endswith(f"// {who} waits"))


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_a_ring_without_a_wait_is_wrong_under_some(who):
    # Without the producer's wait two loads may be under way into one stage; its barrier's counts may overflow, too.
    outcomes = []
    for seed in SEEDS:
        try:
            outcomes.append(ring(without(who), seed))
        except (machine.PtxError, PtxDeadlock):
            outcomes.append(False)
    assert not all(outcomes)


def test_completions_come_in_different_orders():
    # 32 threads each store to one place; the last one to complete stays.
    body = """
        mov.u32 %r1, data;
        mad.lo.u32 %r1, %r0, 16, %r1;
        st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0};
        fence.proxy.async.shared::cta;
        cp.async.bulk.global.shared::cta.bulk_group [%in0], [%r1], 16;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """
    winners = set()
    for seed in SEEDS:
        out = aligned(4, np.uint32)
        run(HEAD + body, out, seed=seed)
        again = aligned(4, np.uint32)
        run(HEAD + body, again, seed=seed)
        assert (out == again).all()  # a seed is one schedule
        winners.add(int(out[0]))
    assert len(winners) > 5


@pytest.mark.parametrize("threads", [1, 2])
def test_clusters_reduce_into_one_place(threads):
    # Every CTA adds its 1024 words to the same memory, on as many OS threads.
    source, out = aligned(1024, np.uint32), aligned(1024, np.uint32)
    source[:] = np.arange(1024)
    body = move("IN", 4096, "%in0", out=False) + """
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%in1], [data], 4096;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """  # fmt: skip
    run(HEAD + body, source, out, grid=64, threads=threads)
    assert (out == np.arange(1024) * 64).all()


def test_a_group_waits_for_its_own_operations_only():
    # Lanes commit different groups: lane 0 two, the others one; wait_group 1 leaves lane 0's second pending.
    body = """
        mov.u32 %r1, data;
        mad.lo.u32 %r1, %r0, 16, %r1;
        mad.wide.u32 %d1, %r0, 16, %in0;
        cp.async.cg.shared.global [%r1], [%d1], 16;
        @%p0 cp.async.commit_group;
        @%p0 cp.async.cg.shared.global [%r1+1024], [%d1], 16;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.u32 %r2, [%r1];
        @!%p0 mov.u32 %r2, 0;
        mad.wide.u32 %d2, %r0, 4, %in1;
        st.global.u32 [%d2], %r2;
        """
    for seed in SEEDS:
        source, out = aligned(128, np.uint32, fill=7), aligned(32, np.uint32)
        run(HEAD + body, source, out, seed=seed)
        assert out[0] == 7
