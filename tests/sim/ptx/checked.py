"""Snippets under the checker: each as it should be, with the lines marked that make it wrong when dropped or added."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from .async_pieces import aligned

machine = pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")

# What every snippet finds: %r0 thread, %r1 warp, %r2 lane, %p0 warp 0, %p1 thread 0, %r3 the shared array mem (8 KB at
# a multiple of 1024), %r4 this lane's word in it, %in0.. the global arrays.
KERNEL = """.version 8.8
.target {target}
.address_size 64
.file 1 "kernel.py"
.visible .entry k({params})
{{
.reg .b64 %in<3>;
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .f32 %f<8>;
.reg .b64 %d<8>;
.shared .align 1024 .b8 mem[8192];
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
and.b32 %r2, %r0, 31;
setp.eq.u32 %p0, %r1, 0;
setp.eq.u32 %p1, %r0, 0;
mov.u32 %r3, mem;
shl.b32 %r4, %r2, 2;
add.u32 %r4, %r4, %r3;
{loads}
{body}
ret;
}}
"""

# Pieces that many snippets share. Mbarriers stand from mem + 4096 on.
STORED = """
st.shared.b32 [%r4], %r2;
fence.proxy.async.shared::cta;
bar.warp.sync 0xffffffff;
"""
BULK_LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [mem + 4096], 128;
@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [mem], [%in0], 128, [mem + 4096];
"""
BULK_STORE = """
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%in0], [mem], 128;
@%p1 cp.async.bulk.commit_group;
"""


def mbarriers(count: int) -> str:
    """That many of one arrival, visible to everybody and to the async proxy."""
    made = (f"@%p1 mbarrier.init.shared::cta.b64 [mem + {4096 + 8 * i}], 1;\n" for i in range(count))
    return "".join(made) + "@%p1 fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"


def wait(label: str = "W1", *, parity: int = 0, at: int = 4096, mark: str = "") -> str:
    return f"""
{label}: mbarrier.try_wait.parity.shared::cta.b64 %p7, [mem + {at}], {parity};{mark}
@!%p7 bra {label};{mark}
"""


@dataclass(frozen=True)
class Case:
    """``body`` is right as it stands. Its wrong twin leaves out the lines that end in ``// needed`` and puts in those
    that start with ``// wrong:``; it has to be reported as ``finding`` (a pattern), and as nothing else."""

    name: str
    finding: str
    body: str
    block: int = 64
    grid: int = 1
    cluster: int = 1
    target: str = "sm_100a"
    arrays: tuple[int, ...] = ()  # bytes of each

    def reports(self, body: str, seed: int) -> list[str]:
        arrays = [aligned(size) for size in self.arrays]
        return reports(
            body, *arrays, block=self.block, grid=self.grid, cluster=self.cluster, target=self.target, seed=seed
        )


def launch(
    body: str,
    *arrays: np.ndarray,
    block: int,
    grid: int = 1,
    cluster: int = 1,
    target: str = "sm_100a",
    seed: int = 0,
    waive: Sequence[str] = (),
    strict: Sequence[str] = (),
) -> Any:
    """The result of a checked run."""
    params = ", ".join(f".param .u64 a{n}" for n in range(len(arrays)))
    loads = "\n".join(f"ld.param.u64 %in{n}, [a{n}];" for n in range(len(arrays)))
    kernel = machine.Module(KERNEL.format(target=target, params=params, loads=loads, body=body)).kernel("k")
    return kernel.launch(
        grid=(grid, 1, 1),
        block=(block, 1, 1),
        cluster=(cluster, 1, 1),
        dynamic_shared=0,
        params=b"".join(a.ctypes.data.to_bytes(8, "little") for a in arrays),
        ranges=[(a.ctypes.data, a.ctypes.data + a.nbytes, True, f"a{n}") for n, a in enumerate(arrays)],
        check=True,
        seed=seed,
        limit=100_000,
        waive=list(waive),
        strict=list(strict),
    )


def reports(body: str, *arrays: np.ndarray, **options: Any) -> list[str]:
    return list(launch(body, *arrays, **options).reports)


def dropped(body: str) -> str:
    """The wrong twin."""
    lines = [line for line in body.splitlines() if not line.endswith("// needed")]
    return "\n".join(lines).replace("// wrong:", "")


def assert_case(case: Case) -> None:
    for seed in (0, 1, 2):
        assert case.reports(case.body, seed) == []
    wrong = dropped(case.body)
    assert wrong != case.body
    found = case.reports(wrong, 0)
    assert found, "nothing was reported"
    assert not [r for r in found if not re.match(case.finding, r)], found


def parametrize(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[c.name for c in cases])
