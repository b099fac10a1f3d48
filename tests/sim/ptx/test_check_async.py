"""The checker on asynchronous copies and on the proxies: bulk copies, cp.async, st.async, mbarrier.init."""

from __future__ import annotations

import numpy as np
import pytest

from .async_pieces import aligned
from .checked import (
    BULK_LOAD,
    BULK_STORE,
    STORED,
    Case,
    assert_case,
    dropped,
    machine,
    mbarriers,
    parametrize,
    reports,
    wait,
)

pytestmark = pytest.mark.simulator

CASES = [
    Case(
        "bulk_load_not_waited_for",
        r"data race|read of uninitialised",
        mbarriers(2)
        + BULK_LOAD
        + wait(mark=" // needed")
        + "ld.shared.b32 %r5, [%r4];\n"
        + "bar.sync 0;\n"
        + wait("W2"),
        arrays=(128,),
    ),
    Case(
        "bulk_load_over_what_is_read",
        r"data race",
        mbarriers(2)
        + BULK_LOAD
        + wait()
        + """
ld.shared.b32 %r5, [%r4];
bar.sync 0; // needed
"""
        + BULK_LOAD.replace("4096", "4104")
        + wait("W2", at=4104),
        arrays=(128,),
    ),
    Case(
        "store_before_its_proxy_fence",
        r"missing fence.proxy.async",
        """
@%p0 st.shared.b32 [%r4], %r2;
fence.proxy.async.shared::cta; // needed
bar.sync 0;
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group.read 0;\n",
        arrays=(128,),
    ),
    Case(
        "fence_on_the_reading_side",
        r"missing fence.proxy.async",
        """
@!%p0 st.shared.b32 [%r4], %r2;
bar.sync 0;
@%p1 fence.proxy.async; // needed
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group.read 0;\n",
        arrays=(128,),
    ),
    Case(
        "fence_of_another_space",
        r"missing fence.proxy.async",
        """
@%p0 st.shared.b32 [%r4], %r2;
fence.proxy.async.shared::cta; // needed
// wrong:fence.proxy.async.global;
bar.sync 0;
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group.read 0;\n",
        arrays=(128,),
    ),
    Case(
        "generic_write_to_global_and_bulk_load",
        r"missing fence.proxy.async",
        mbarriers(2)
        + """
mul.wide.u32 %d2, %r2, 4;
add.u64 %d2, %in0, %d2;
@%p0 st.global.u32 [%d2], %r2;
fence.proxy.async.global; // needed
bar.sync 0;
"""
        + BULK_LOAD
        + wait(),
        arrays=(128,),
    ),
    Case(
        "source_of_a_bulk_store_overwritten",
        r"data race \(write after read\)",
        STORED
        + BULK_STORE
        + """
@%p1 cp.async.bulk.wait_group.read 0; // needed
bar.warp.sync 0xffffffff;
st.shared.b32 [%r4], %r3;
@%p1 cp.async.bulk.wait_group 0;
""",
        block=32,
        arrays=(128,),
    ),
    Case(
        "result_of_a_bulk_store_read",
        r"data race \(read after write\)",
        STORED
        + BULK_STORE
        + """
@%p1 cp.async.bulk.wait_group 0; // needed
// wrong:@%p1 cp.async.bulk.wait_group.read 0;
bar.warp.sync 0xffffffff;
ld.global.u32 %r5, [%in0];
""",
        block=32,
        arrays=(128,),
    ),
    Case(
        "exit_before_a_bulk_store_has_read",
        r"note: a CTA exits before",
        STORED + BULK_STORE + "@%p1 cp.async.bulk.wait_group.read 0; // needed\n",
        block=32,
        arrays=(128,),
    ),
    Case(
        "exit_before_a_bulk_load_has_come",
        r"a CTA exits before this access",
        mbarriers(2) + BULK_LOAD + wait(mark=" // needed"),
        arrays=(128,),
    ),
    Case(
        "mbarrier_not_made_visible",
        r"missing fence.mbarrier_init",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
@%p1 fence.mbarrier_init.release.cluster; // needed
bar.sync 0;
"""
        + BULK_LOAD
        + wait(),
        arrays=(128,),
    ),
    Case(
        "mbarrier_of_a_neighbour",
        r"use of an mbarrier that is not ordered|missing fence.mbarrier_init",
        """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
@%p1 fence.mbarrier_init.release.cluster; // needed
barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
mov.u32 %r6, %cluster_ctarank;
xor.b32 %r7, %r6, 1;
add.u32 %r8, %r3, 4096;
mapa.shared::cluster.u32 %r9, %r8, %r7;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r9];
W1: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
""",
        block=32,
        grid=2,
        cluster=2,
    ),
    Case(
        "cp_async_not_waited_for",
        r"data race \(read after write\)",
        """
mul.wide.u32 %d2, %r2, 16;
add.u64 %d2, %in0, %d2;
shl.b32 %r5, %r2, 4;
add.u32 %r5, %r3, %r5;
cp.async.cg.shared.global [%r5], [%d2], 16;
cp.async.commit_group;
cp.async.wait_group 0; // needed
ld.shared.b32 %r6, [%r5];
cp.async.wait_group 0;
""",
        block=32,
        arrays=(512,),
    ),
    Case(
        "cp_async_of_the_newer_group",
        r"data race \(read after write\)",
        """
mul.wide.u32 %d2, %r2, 16;
add.u64 %d2, %in0, %d2;
shl.b32 %r5, %r2, 4;
add.u32 %r5, %r3, %r5;
cp.async.cg.shared.global [%r5], [%d2], 16;
cp.async.commit_group;
cp.async.cg.shared.global [%r5 + 512], [%d2], 16;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.b32 %r6, [%r5];
cp.async.wait_group 0; // needed
ld.shared.b32 %r6, [%r5 + 512];
cp.async.wait_group 0;
""",
        block=32,
        arrays=(512,),
    ),
    Case(
        "cp_async_and_the_async_proxy",
        r"missing fence.proxy.async",
        """
mul.wide.u32 %d2, %r2, 16;
add.u64 %d2, %in1, %d2;
shl.b32 %r5, %r2, 4;
add.u32 %r5, %r3, %r5;
cp.async.cg.shared.global [%r5], [%d2], 16;
cp.async.commit_group;
cp.async.wait_group 0;
fence.proxy.async; // needed
bar.warp.sync 0xffffffff;
"""
        + BULK_STORE
        + "@%p1 cp.async.bulk.wait_group.read 0;\n",
        block=32,
        arrays=(128, 512),
    ),
    Case(
        "reductions_do_not_race",
        r"data race",
        """
mov.u32 %r5, 1;
st.shared.b32 [%r4], %r5;
fence.proxy.async.shared::cta;
bar.warp.sync 0xffffffff;
@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%in0], [mem], 128;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
// wrong:ld.global.u32 %r6, [%in0];
""",
        block=32,
        grid=2,
        arrays=(128,),
    ),
    Case(
        "st_async_into_a_neighbour",
        r"data race|read of uninitialised",
        """
mov.u32 %r10, 128;
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive;
barrier.cluster.wait;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 128;
mov.u32 %r6, %cluster_ctarank;
xor.b32 %r7, %r6, 1;
add.u32 %r8, %r3, 4096;
mapa.shared::cluster.u32 %r9, %r8, %r7;
mapa.shared::cluster.u32 %r5, %r4, %r7;
st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r2, [%r9];
W1: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [mem + 4096], 0; // needed
@!%p7 bra W1; // needed
ld.shared.b32 %r11, [%r4];
W2: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W2;
barrier.cluster.arrive;
barrier.cluster.wait;
""",
        block=32,
        grid=2,
        cluster=2,
    ),
]

# Thread 0 makes the tensor map at the start of array 1 name array 0, and copies by it.
CHANGED_MAP = (
    mbarriers(2)
    + """
@!%p1 bra W1;
tensormap.replace.tile.global_address.global.b1024.b64 [%in1], %in0;
fence.proxy.tensormap::generic.release.cta;
fence.proxy.tensormap::generic.acquire.cta [%in1], 128; // needed
mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 128;
mov.b32 %r5, 0;
cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [mem], [%in1, {%r5}], [mem + 4096];
"""
    + wait()
)


@parametrize(CASES)
def test_case(case: Case) -> None:
    assert_case(case)


# Two warps store 128 bytes each to the same place; every warp waits for its own.
TWO_STORES = """
mul.lo.u32 %r5, %r1, 128;
add.u32 %r5, %r5, %r3;
add.u32 %r6, %r5, {lane};
st.shared.b32 [%r6], {value};
fence.proxy.async.shared::cta;
bar.sync 0;
setp.eq.u32 %p2, %r2, 0;
@%p2 {store};
@%p2 cp.async.bulk.commit_group;
@%p2 cp.async.bulk.wait_group 0;
"""
STORES = {
    "tensor": "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%in1, {%r7}], [%r5]",
    "bulk": "cp.async.bulk.global.shared::cta.bulk_group [%in0], [%r5], 128",
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("value", "what"), [("%r2", "note: data race that writes"), ("%r0", "data race (write after")])
def test_copies_of_one_identical_tile(store: str, value: str, what: str) -> None:
    body = "mov.b32 %r7, 0;\nshl.b32 %r8, %r2, 2;" + TWO_STORES.replace("{lane}", "%r8")
    body = body.replace("{value}", value).replace("{store}", STORES[store])
    for seed in range(5):
        data, tensor_map = aligned(128), aligned(128)
        tensor_map[:] = np.frombuffer(machine.tensor_map_encode(7, data.ctypes.data, [32], [], [32], [1]), np.uint8)
        found = reports(body, data, tensor_map, block=64, seed=seed)
        assert found and all(r.startswith(what) for r in found), found


def test_identical_copies_into_shared_memory_are_a_race() -> None:
    """A stage of a pipeline that is filled too early is one, whatever the tensor holds."""
    load = """
mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + {at}], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [mem], [%in0], 128, [mem + {at}];
"""
    body = mbarriers(2) + "@!%p1 bra W1;" + load.format(at=4096) + load.format(at=4104) + wait() + wait("W2", at=4104)
    (found,) = reports(body, aligned(128), block=64)
    assert found.startswith("data race (write after write)")


def test_a_changed_tensor_map_needs_its_fence() -> None:
    for body, expected in ((CHANGED_MAP, 0), (dropped(CHANGED_MAP), 1)):
        data, tensor_map = aligned(128), aligned(128)
        tensor_map[:] = np.frombuffer(machine.tensor_map_encode(7, data.ctypes.data, [32], [], [32], [1]), np.uint8)
        found = reports(body, data, tensor_map, block=64)
        assert [r.startswith("missing fence.proxy.tensormap") for r in found] == [True] * expected
