"""One entry of the table of tiles makes every op right at that head size: D 160, which no table has."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core import Kernel, Op, dispatch
from torch_attnkit.parity.case import all_features
from torch_attnkit.parity.judge import judge

from ..test_head_sizes import NEW, PREFILL, added

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]


@pytest.fixture
def kept():
    """Records with the rows that they have again after the test; plans are forgotten."""
    rows: list[tuple[Op, tuple[Kernel, ...]]] = []
    yield rows
    for record, kernels in rows:
        object.__setattr__(record, "kernels", kernels)
        dispatch._PLANS[record.name].clear()


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PREFILL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_one_entry_makes_every_op_right_at_that_size(name, dtype, kept):
    """A shape of parity's with all features that go all_features, in the simulator."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    with added("sm90" if dtype.itemsize == 2 else "sm90 fp8") as ops:
        op = ops[name]
        given = dispatch.OPS[name]  # which the operator of torch calls for ever
        kept.append((given, given.kernels))
        object.__setattr__(given, "kernels", op.kernels)
        rows = [row for row in op.kernels if "sm90" in row.archs and NEW[0] in row.dims["D"]]
        assert len(rows) == 1
        shape = list(op.module("cases").PARITY)[-1]
        args, kwargs = parity.inputs(
            op, shape, dtype, all_features(op, tuple(rows[0].features.split()))[0], (("D", 160), ("Dv", 160))
        )
        judge(name, op, "sm90", args, args, kwargs)
