"""The checker on tensor memory (tcgen05) and on wgmma: waits, fences, registers in flight, validity of cells."""

from __future__ import annotations

import pytest

from .checked import Case, assert_case, parametrize, reports, wait

pytestmark = pytest.mark.simulator

# 32 columns of tensor memory, their address in %r5.
ALLOC = """
@!%p0 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [mem + 8000], 32;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED: bar.sync 0;
ld.shared.b32 %r5, [mem + 8000];
"""
FREE = """
bar.sync 0;
@!%p0 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
END:
"""
# 4 KB of shared memory, 32 bytes by each of 128 threads; %d3 describes them (K-major, no swizzle), an mbarrier at 4096.
FILL = """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
@%p1 fence.mbarrier_init.release.cluster;
shl.b32 %r6, %r0, 5;
add.u32 %r6, %r6, %r3;
st.shared.v4.b32 [%r6], {%r0, %r0, %r0, %r0};
st.shared.v4.b32 [%r6 + 16], {%r0, %r0, %r0, %r0};
fence.proxy.async.shared::cta;{mark}
bar.sync 0;
shr.u32 %r7, %r3, 4;
mov.b32 %r10, 0;
mov.b64 %d3, {%r7, %r10};
or.b64 %d3, %d3, {descriptor};
"""
TENSOR_FILL = FILL.replace("{descriptor}", str(1 << 46 | 16 << 32 | 8 << 16))
COPY = """
@%p1 tcgen05.cp.cta_group::1.128x256b [%r5], %d3;
@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mem + 4096];
"""
AFTER = "tcgen05.fence::after_thread_sync;\n"
BEFORE = "tcgen05.fence::before_thread_sync;\n"
LOAD = """
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r5];
tcgen05.wait::ld.sync.aligned;
"""
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r0};\n"

# wgmma m64n8k16: A is 2 KB, B 256 bytes at 2048 (K-major, no swizzle).
MULTIPLY = """
or.b64 %d4, %d3, 0;
add.u64 %d5, %d3, 128;
mov.f32 %f0, 0f00000000;
mov.f32 %f1, 0f00000000;
mov.f32 %f2, 0f00000000;
mov.f32 %f3, 0f00000000;
{fence}
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %d4, %d5, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
"""
WGMMA_FILL = FILL.replace("{descriptor}", str(16 << 32 | 8 << 16))
FENCED = MULTIPLY.format(fence="wgmma.fence.sync.aligned;")

CASES = [
    Case(
        "load_after_store",
        r"data race \(read after write\)",
        ALLOC + STORE + "tcgen05.wait::st.sync.aligned; // needed\n" + LOAD + "tcgen05.wait::st.sync.aligned;\n" + FREE,
        block=128,
    ),
    Case(
        "store_after_load",
        r"data race \(write after read\)",
        ALLOC
        + STORE
        + "tcgen05.wait::st.sync.aligned;\n"
        + LOAD.replace("ld.sync.aligned;", "ld.sync.aligned; // needed")
        + STORE
        + "tcgen05.wait::st.sync.aligned;\ntcgen05.wait::ld.sync.aligned;\n"
        + FREE,
        block=128,
    ),
    Case(
        "store_of_what_was_loaded",
        r"data race \(write after read\)",
        ALLOC
        + STORE
        + "tcgen05.wait::st.sync.aligned;\n"
        + """
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r5];
mov.b32 %r9, 5;
add.u32 %r9, %r8, 1; // needed
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r9};
tcgen05.wait::st.sync.aligned;
tcgen05.wait::ld.sync.aligned;
"""
        + FREE,
        block=128,
    ),
    Case(
        "a_load_that_is_stored_and_freed",
        r"data race \(write after read\), kernel k, tensor memory",
        ALLOC
        + STORE
        + """
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r8}, [%r5];
tcgen05.wait::ld.sync.aligned; // needed
mov.b32 %r9, %r8;
@%p0 st.shared.b32 [%r4], %r9;
"""
        + FREE,
        block=128,
    ),
    Case(
        "uninitialised_cells",
        r"read of uninitialised memory",
        ALLOC + STORE.replace(";", "; // needed") + "tcgen05.wait::st.sync.aligned;\n" + LOAD + FREE,
        block=128,
    ),
    Case(
        "copy_not_waited_for",
        r"data race|read of uninitialised",
        ALLOC
        + TENSOR_FILL.replace("{mark}", "")
        + COPY
        + wait(mark=" // needed")
        + AFTER
        + LOAD
        + wait("W2")
        + BEFORE
        + FREE.replace("@!%p0 bra", AFTER + "@!%p0 bra"),
        block=128,
    ),
    Case(
        "copy_without_a_proxy_fence",
        r"missing fence.proxy.async",
        ALLOC
        + TENSOR_FILL.replace("{mark}", " // needed")
        + COPY
        + wait()
        + AFTER
        + LOAD
        + BEFORE
        + FREE.replace("@!%p0 bra", AFTER + "@!%p0 bra"),
        block=128,
    ),
    Case(
        "tensor_fence_after",
        r"note: not ordered by tcgen05.fence",
        ALLOC
        + TENSOR_FILL.replace("{mark}", "")
        + COPY
        + wait()
        + AFTER.replace(";", "; // needed")
        + LOAD
        + BEFORE
        + FREE.replace("@!%p0 bra", AFTER + "@!%p0 bra"),
        block=128,
    ),
    Case(
        "freed_while_others_read",
        r"data race \(write after read\)",
        ALLOC
        + STORE
        + """
tcgen05.wait::st.sync.aligned;
@%p0 bar.sync 1, 128;
@!%p0 bar.arrive 1, 128;
"""
        + LOAD
        + FREE.replace("sync 0;", "sync 0; // needed"),
        block=128,
    ),
    Case(
        "wgmma_fence",
        r"missing wgmma.fence",
        WGMMA_FILL.replace("{mark}", "")
        + MULTIPLY.format(fence="wgmma.fence.sync.aligned; // needed")
        + "wgmma.wait_group.sync.aligned 0;\nadd.f32 %f4, %f0, %f1;\n",
        block=128,
        target="sm_90a",
    ),
    Case(
        "wgmma_registers_written_after_the_fence",
        r"missing wgmma.fence",
        WGMMA_FILL.replace("{mark}", "")
        + FENCED
        + """
wgmma.wait_group.sync.aligned 0;
mul.f32 %f0, %f0, %f1;
wgmma.fence.sync.aligned; // needed
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %d4, %d5, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
""",
        block=128,
        target="sm_90a",
    ),
    Case(
        "wgmma_not_waited_for",
        r"missing wgmma.wait_group",
        WGMMA_FILL.replace("{mark}", "")
        + FENCED
        + "wgmma.wait_group.sync.aligned 0; // needed\nadd.f32 %f4, %f0, %f1;\nwgmma.wait_group.sync.aligned 0;\n",
        block=128,
        target="sm_90a",
    ),
    Case(
        "wgmma_operand_overwritten",
        r"data race \(write after read\)",
        WGMMA_FILL.replace("{mark}", "")
        + FENCED
        + """
wgmma.wait_group.sync.aligned 0; // needed
st.shared.b32 [%r6], %r3;
wgmma.wait_group.sync.aligned 0;
""",
        block=128,
        target="sm_90a",
    ),
    Case(
        "wgmma_without_a_proxy_fence",
        r"missing fence.proxy.async",
        WGMMA_FILL.replace("{mark}", " // needed") + FENCED + "wgmma.wait_group.sync.aligned 0;\n",
        block=128,
        target="sm_90a",
    ),
]


@parametrize(CASES)
def test_case(case: Case) -> None:
    assert_case(case)


def test_registers_of_a_load_are_watched_when_asked() -> None:
    """The ISA lets a register dependency give the value; FlashAttention-4's forward has no tcgen05.wait::ld."""
    used = ALLOC + STORE + "tcgen05.wait::st.sync.aligned;\n" + LOAD + "add.u32 %r9, %r8, 1;\n" + FREE
    early = used.replace("tcgen05.wait::ld.sync.aligned;\nadd.u32 %r9, %r8, 1;", "add.u32 %r9, %r8, 1;")
    assert early != used
    for seed in range(4):
        assert reports(used, block=128, seed=seed, strict=("registers_loading",)) == []
        assert reports(early, block=128, seed=seed) == []
        (found,) = reports(early, block=128, seed=seed, strict=("registers_loading",))
        assert found.startswith("missing tcgen05.wait::ld: registers of a pending tcgen05.ld are used")
        assert "add.u32 %r9, %r8, 1" in found and "tcgen05.ld.sync" in found
