"""The one parity test: every row of the table that this machine can run, on hardware or in a simulator."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core import seams
from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.core.support import support
from torch_attnkit.core.target import target_of
from torch_attnkit.sim import ptx


def _device(arch: str) -> str | None:
    """The device that runs ``arch`` here: its hardware, else the CPU through its simulator, else None."""
    if arch == "cpu":
        return "cpu"
    for device, available in (
        ("cuda", torch.cuda.is_available()),
        ("mps", torch.backends.mps.is_available()),
    ):
        if available and target_of(torch.device(device)).arch == arch:
            return device
    try:
        seams.require_simulator(arch)
    except UnsupportedError:
        return None
    if arch.startswith("sm") and not all(map(importlib.util.find_spec, ("nvidia_cutlass_dsl", "tvm_ffi"))):
        return None  # the PTX simulator runs what these compile
    return "cpu"


def _cases() -> list[tuple[parity.Case, str, str | None]]:
    """Every case of a row that can run here; of any other row one, which says what it needs."""
    found = []
    for op, index, _, arch in support():
        device = _device(arch)
        cases = parity.cases(op, index, arch, covering=device == "cpu" != arch)
        for n, case in enumerate(cases if device else cases[:1]):
            found.append((case, parity.LAYOUTS[n % 2], device))
    return found


CASES = _cases()


@pytest.mark.parametrize(("case", "layout", "device"), CASES, ids=[f"{c.id}-{layout}" for c, layout, _ in CASES])
def test_parity(case: parity.Case, layout: str, device: str | None):
    if device is None:
        pytest.skip(f"needs {case.arch} hardware or its simulator")
    # Only the PTX simulator has these settings: seed 0 is the plain schedule, the others are hostile ones. What has
    # never run on its hardware gets all of them, which adds a fifth of a second a case; otherwise they take turns.
    seeds = range(4) if (case.arch, device) == ("sm100", "cpu") else (CASES.index((case, layout, device)) % 4,)
    for seed in seeds:
        with ptx.settings(check=True, seed=seed):
            found = parity.run(case, device, layout)
            if isinstance(found, parity.Refused):
                pytest.skip(f"the row refuses it: {found.why}")


def test_a_wrong_kernel_is_caught(monkeypatch):
    """The parity run itself must be able to fail: values, borders, inputs and a kernel that never writes."""
    op, index, _, arch = next(r for r in support("cpu"))
    case = parity.cases(op, index, arch)[0]
    module = op.module(op.kernels[index].file)
    build = module.build

    def off_by_a_bit(call, target):
        launch = build(call, target)

        def run(*args):
            launch(*args)
            args[len(op.argnames)].mul_(1.01)

        return run

    def changes_input(call, target):
        launch = build(call, target)
        return lambda *args: (launch(*args), args[0].zero_())

    def writes_past_the_end(call, target):
        launch = build(call, target)

        def run(*args):
            launch(*args)
            out = args[len(op.argnames)]
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)

        return run

    def never_writes(call, target):
        return lambda *args: None

    from torch_attnkit.core import dispatch

    for broken in (off_by_a_bit, changes_input, writes_past_the_end, never_writes):
        dispatch._PLANS[op.name].clear()
        monkeypatch.setattr(module, "build", broken)
        with pytest.raises(AssertionError):
            parity.run(case)
    dispatch._PLANS[op.name].clear()
