"""Which instructions and how much shared memory a target has: ptxas 13.5 was asked for each line of the table.

``sm_120`` has less than ``sm_120f`` and ``sm_120a``: what a family or one GPU has is not of the plain target.
"""

from __future__ import annotations

import numpy as np
import pytest

from torch_attnkit.cuda.compile import GPU_ARCH
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.sim import _ptx, ptx

from .snippet import kernel

pytestmark = pytest.mark.simulator

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120", "sm_120f", "sm_120a", "sm_121a")
EVERY, ADA, HOPPER, BLACKWELL = TARGETS, TARGETS[2:], TARGETS[3:], TARGETS[4:]
FAMILY = ("sm_100f", "sm_120f", "sm_120a", "sm_121a")  # of Blackwell, not of plain sm_120
ZERO = "{%r0, %r0}"
FOUR = "{%r0, %r1, %r2, %r3}"
MMA = f"{FOUR}, {FOUR}, {ZERO}, {FOUR}"
SCALES = "%r0, {%h0, %h0}, %r0, {%h0, %h0}"
INSTRUCTIONS = [
    (f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {FOUR}, [smem]", EVERY),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [smem]", FAMILY),
    (f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [smem], {FOUR}", HOPPER),
    ("movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1", EVERY),
    ("cp.async.cg.shared.global [smem], [%in0], 16", EVERY),
    (f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {MMA}", EVERY),
    (f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {MMA}", ADA),
    (f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32 {MMA}", FAMILY[1:]),
    (
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
        f"{MMA}, {SCALES}",
        FAMILY[1:],
    ),
    (
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        f"{MMA}, {SCALES}",
        FAMILY[1:],
    ),
    ("wgmma.fence.sync.aligned", ("sm_90a",)),
    ("tcgen05.wait::ld.sync.aligned", ("sm_100f",)),
    ("setmaxnreg.dec.sync.aligned.u32 64", ("sm_90a", *FAMILY)),
    ("mbarrier.try_wait.parity.shared::cta.b64 %p0, [smem], 0", HOPPER),
    ("mbarrier.arrive.expect_tx.shared::cta.b64 %d0, [smem], 16", HOPPER),
    ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [%in0], 16, [smem]", HOPPER),
    ("mapa.shared::cluster.u32 %r0, %r1, 0", HOPPER),
    ("barrier.cluster.arrive.aligned", HOPPER),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r0], %r1, [%r2]", HOPPER),
    ("griddepcontrol.wait", HOPPER),
    ("cvt.rn.f16x2.e4m3x2 %r0, %h0", ADA),
    ("cvt.rn.satfinite.e4m3x2.f32 %h0, %r0, %r1", ADA),
    ("redux.sync.add.s32 %r0, %r1, -1", EVERY),
    ("elect.sync %r0|%p0, -1", HOPPER),
    ("add.rn.f32x2 %d0, %d1, %d2", BLACKWELL),
    ("fma.rn.f32x2 %d0, %d1, %d2, %d3", BLACKWELL),
    ("max.f32 %r0, %r1, %r2, %r3", BLACKWELL),
    ("max.f32 %r0, %r1, %r2", EVERY),
    ("ex2.approx.ftz.bf16x2 %r0, %r1", HOPPER),
    ("fma.rn.bf16x2 %r0, %r1, %r2, %r3", EVERY),
    ("mul.rn.bf16x2 %r0, %r1, %r2", HOPPER),
    ("fence.proxy.async", HOPPER),
]


@pytest.mark.parametrize(("instruction", "known"), INSTRUCTIONS, ids=[i.split(" ")[0] for i, _ in INSTRUCTIONS])
def test_a_target_knows_what_ptxas_takes_for_it(instruction, known):
    for target in TARGETS:
        module = _ptx.Module(kernel(f"{instruction};", 1, target=target))
        if target in known:
            module.kernel("snippet")
        else:
            with pytest.raises(_ptx.PtxError, match=f"is not supported on .target '{target}'"):
                module.kernel("snippet")


def launch(target: str, shared: int, cluster: int = 1) -> None:
    out = np.zeros(1, np.int32)
    _ptx.Module(kernel("", 1, target=target)).kernel("snippet").launch(
        grid=(2, 1, 1), block=(32, 1, 1), cluster=(cluster, 1, 1), dynamic_shared=shared,
        params=out.ctypes.data.to_bytes(8, "little"), ranges=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "most"), [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_120f", 99)]
)
def test_a_cta_has_the_targets_shared_memory_and_no_more(target, most):
    launch(target, most << 10)
    with pytest.raises(_ptx.PtxError, match=f"a CTA has at most {most} KB"):
        launch(target, (most << 10) + 1)


def test_there_are_no_clusters_before_hopper():
    launch("sm_90a", 0, cluster=2)
    with pytest.raises(_ptx.PtxError, match="a cluster of CTAs; there are none on sm_89"):
        launch("sm_89", 0, cluster=2)


def test_plans_and_the_simulator_know_the_same_limits():
    """What is compiled for sm_80 also runs on GPUs of 8.6, which have less than an A100: plans go by the less."""
    assert LIMITS.keys() == GPU_ARCH.keys() == ptx.GPUS.keys()
    for arch, limits in LIMITS.items():
        least = _ptx.limits("sm_86" if arch == "sm80" else GPU_ARCH[arch])
        assert limits.shared == least.shared, arch
