"""Every barrier of the kernels is needed, and the simulator sees each that is missing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from torch_attnkit.core import dispatch
from torch_attnkit.core.target import Target
from torch_attnkit.mps import library
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
BARRIER = re.compile(r"threadgroup_barrier\([^)]*\);")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# Shapes with several simdgroups and several tiles of keys. Of ``barriers``, as many stand in the op's source.
CASES = {
    "gated_rmsnorm": (1, lambda: (normal(2, 2000), normal(2, 2000), normal(2000))),
    "sdpa_decode": (
        3,
        lambda: (normal(1, 4, 64), *2 * [normal(1, 1, 200, 64)], torch.tensor([200], dtype=torch.int32)),
    ),
    "flash_attention": (2, lambda: (normal(1, 40, 2, 64), *2 * [normal(1, 90, 1, 64)])),
}


def run(op_name: str) -> None:
    op = dispatch.OPS[op_name]
    args: Any = CASES[op_name][1]()
    values = (*args, *(op.defaults.get(n) for n in op.argnames[len(args) :]))
    call = op.bind(values)
    outs = [torch.empty(shape, dtype=dtype) for shape, dtype in op.outputs(call)]
    with metal.settings(mode="checked", strict=True):
        op.module("mps").build(call, Target("metal", simulated=True))(*values, *outs)


@pytest.mark.parametrize("op", CASES)
def test_the_kernels_themselves_are_clean(op: str):
    assert len(BARRIER.findall(library.source(op, {}))) == CASES[op][0]
    run(op)


@pytest.mark.parametrize(("op", "index"), [(op, i) for op, (n, _) in CASES.items() for i in range(n)])
def test_a_missing_barrier_is_seen(op: str, index: int, monkeypatch: pytest.MonkeyPatch):
    original = library.source

    def without(name: str, defines: dict[str, Any]) -> str:
        text = original(name, defines)
        place = list(BARRIER.finditer(text))[index]
        return text[: place.start()] + ";" + text[place.end() :]

    monkeypatch.setattr(library, "source", without)
    with pytest.raises(metal.SimulationError, match="race|no thread of this threadgroup has written"):
        run(op)
