"""What the counters say of small kernels, and that the roofline follows from them as its module states."""

from __future__ import annotations

import pytest
from rich.console import Console

from torch_attnkit.cuda.compile import GPU_ARCH
from torch_attnkit.sim.ptx import counters
from torch_attnkit.sim.ptx.settings import Launch
from torch_attnkit.sim.ptx.targets import processors_of

from .async_pieces import aligned
from .checked import launch

pytestmark = pytest.mark.simulator


def record(body: str, *sizes: int, block: int = 32, grid: int = 1, target: str = "sm_100a") -> Launch:
    result = launch(body, *(aligned(size) for size in sizes), block=block, grid=grid, target=target)
    assert not result.reports
    return Launch("k", target, (grid, 1, 1), (block, 1, 1), (1, 1, 1), 0, result.counters)


def test_bytes_and_sectors_of_global_memory():
    body = """
mul.wide.u32 %d1, %r2, 16;
add.u64 %d1, %in0, %d1;
ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%d1];
mul.wide.u32 %d1, %r2, 64;
add.u64 %d1, %in1, %d1;
st.global.u32 [%d1], %r5;
"""
    c = record(body, 512, 2048).counters
    assert (c["global_read"], c["global_written"]) == (512, 128)
    assert c["global_sectors"] == 16 + 32  # 32 lanes that are 64 bytes apart touch a sector each


@pytest.mark.parametrize(("stride", "conflicts"), [(4, 0), (8, 1), (16, 3), (128, 31), (132, 0)])
def test_bank_conflicts(stride, conflicts):
    body = f"mad.lo.u32 %r5, %r2, {stride}, %r3;\nst.shared.u32 [%r5], %r2;\n"
    c = record(body).counters
    assert c["shared_wavefronts"] - c["shared_least_wavefronts"] == conflicts
    assert (c["shared_read"], c["shared_written"]) == (0, 128)


def test_bulk_copies():
    body = """
@%p1 mbarrier.init.shared::cta.b64 [mem + 4096], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 128;
@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [mem], [%in0], 128, [mem + 4096];
W1: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + 4096], 0;
@!%p7 bra W1;
"""
    c = record(body, 128).counters
    assert (c["tma_read"], c["tma_written"], c["tma_transactions"]) == (128, 0, 1)


def test_roles_are_neighbours_that_issue_alike():
    launch = Launch("k", "sm_100a", (1, 1, 1), (192, 1, 1), (1, 1, 1), 0, {"by_warp": [100, 98, 10, 400, 395, 400]})
    assert counters.roles(launch) == {"warps 0-1": 198 / 1403, "warp 2": 10 / 1403, "warps 3-5": 1195 / 1403}


def given(**changes: object) -> Launch:
    names = (
        "instructions global_read global_written global_sectors tma_read tma_written tma_transactions cp_async "
        "shared_read shared_written shared_wavefronts shared_least_wavefronts tmem_read tmem_written tensor_shared_read"
    )
    zero: dict[str, object] = dict.fromkeys(names.split(), 0)
    found = {**zero, "flops": {}, "by_class": {}, "by_warp": [0], **changes}
    return Launch("k", "sm_100a", (1480, 1, 1), (128, 1, 1), (1, 1, 1), 0, found)


@pytest.mark.parametrize(
    ("changes", "what", "microseconds"),
    [
        ({"tma_read": 8_000_000}, "memory", 1.0),
        ({"global_read": 4_000_000, "global_written": 4_000_000}, "memory", 1.0),
        ({"flops": {"f16": 2_250_000_000}}, "tensor cores", 1.0),
        ({"flops": {"mxf4nvf4": 9_000_000_000, "tf32": 1_100_000_000}}, "tensor cores", 2.0),
        ({"instructions": 148 * 1860 * 4}, "issue slots", 1.0),
        ({"by_class": {"special_function": 148 * 1860}}, "special functions", 2.0),
        ({"shared_wavefronts": 148 * 1860}, "shared memory", 1.0),
    ],
)
def test_each_resource_takes_its_time(changes, what, microseconds):
    time, limit = counters.bound(given(**changes), counters.CHIPS["sm_100a"])
    assert limit == what and time == pytest.approx(microseconds)


def test_what_the_package_compiles_for_is_a_chip():
    for target in GPU_ARCH.values():
        assert counters.CHIPS[target].processors == processors_of(target)


def test_few_ctas_use_few_processors():
    few = Launch(
        "k", "sm_90a", (33, 1, 1), (128, 1, 1), (1, 1, 1), 0, given(flops={"wgmma bf16": 989_000_000}).counters
    )
    assert counters.bound(few, counters.CHIPS["sm_90a"]) == (pytest.approx(4.0), "tensor cores")


def test_the_estimate_says_that_it_is_one(capsys):
    counters.print_roofline(Console(), "a title", [given(tma_read=8_000_000, instructions=10)])
    printed = capsys.readouterr().out
    assert printed.startswith("a title") and "modelled, not measured: at least 1 us on a B200 (memory)" in printed
