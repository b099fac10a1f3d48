"""What torch.empty gave and nobody wrote is not read in a checked mode, whoever could have written it."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import simulate
from torch_attnkit.kernels.decode import metal as decode
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import fresh

pytestmark = pytest.mark.simulator
COPY = """#include <metal_stdlib>
using namespace metal;
kernel void copy(device float* out, device const float* in, uint i [[thread_position_in_grid]]) { out[i] = in[i]; }
"""
HOLE = r"copy: read of buffer\(1\), byte {}, which nothing has written since it was allocated at line 3 .*thread {} "


def copy(out: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    metal.compile_shader(COPY).copy(out, source, threads=threads)


@pytest.mark.parametrize("mode", ["checked", "counting"])
def test_a_read_of_what_nobody_wrote(mode: str):
    with metal.settings(mode=mode):
        x = torch.empty(8)
        x[:5] = 1
        copy(torch.zeros(8), x, 5)
        with pytest.raises(metal.SimulationError, match=HOLE.format(20, 5)):
            copy(torch.zeros(8), x, 8)


def test_a_kernel_fills_what_it_writes_and_no_more():
    with metal.settings(mode="checked"):
        x, y = torch.empty(8), torch.empty(8)
        copy(x, torch.ones(8), 6)
        copy(y, x, 6)
        with pytest.raises(metal.SimulationError, match=HOLE.format(24, 6)):
            copy(torch.zeros(8), y, 7)
        with pytest.raises(metal.SimulationError, match=HOLE.format(24, 6)):
            copy(y, x, 7)  # a launch that fails has written nothing
        with pytest.raises(metal.SimulationError, match=HOLE.format(24, 6)):
            copy(torch.zeros(8), y, 7)


def test_a_launch_that_was_not_looked_at_has_written_everything():
    with metal.settings(mode="checked"):
        x = torch.empty(8)
        with metal.settings(mode="fast"):
            copy(x, torch.ones(8), 4)
        copy(torch.zeros(8), x, 8)


MAKERS = {
    "empty_like": lambda: torch.empty_like(torch.zeros(8)),
    "new_empty": lambda: torch.zeros(3).new_empty(8),
    "empty_strided": lambda: torch.empty_strided((8,), (1,)),
    "a view": lambda: torch.empty(12)[4:],
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_way_to_allocate_is_known(name: str):
    with metal.settings(mode="checked"), pytest.raises(metal.SimulationError, match=HOLE.format(0, 0)):
        copy(torch.zeros(8), MAKERS[name](), 8)


def test_pytorch_fills_the_elements_that_it_writes():
    with metal.settings(mode="checked"):
        x = torch.empty(4, 4)
        x.T[1:3].copy_(torch.ones(2, 4))
        torch.add(torch.ones(4), 1, out=x[:, 0])
        mask = fresh.mask(x)
        assert mask is not None and mask.view(4, 4, 4).all(-1).tolist() == [[True, True, True, False]] * 4
        x[:, 3] = 0
        assert fresh.mask(x) is None


def test_nothing_is_tracked_outside_and_in_fast_mode():
    before, out = torch.empty(8), torch.zeros(8)
    copy(out, before.fill_(3), 8)
    assert fresh.mask(before) is None and out.eq(3).all()
    with metal.settings(mode="checked"):
        assert fresh.mask(before) is None
        copy(out, before.neg_(), 8)
        within = torch.empty(8)
        assert fresh.mask(within) is not None
    assert out.eq(-3).all()
    copy(out, within, 8)  # outside again nobody asks
    assert torch.equal(out.view(torch.int32), within.view(torch.int32))


def test_what_an_op_allocates_inside_is_tracked(monkeypatch: pytest.MonkeyPatch):
    """The partial results of decode come from torch.empty: were a split left out, the merge would read a hole."""
    args = torch.randn(1, 4, 64), *torch.randn(2, 1, 1, 600, 64), torch.tensor([600], dtype=torch.int32)
    with simulate("metal"), metal.settings(mode="checked"):
        torch.ops.attnkit.sdpa_decode(*args)
    launcher = decode.metal.launcher

    def one_split_less(library, kernel, groups, threads):
        return launcher(library, kernel, (groups[0], groups[1] - (kernel == "decode_rows"), groups[2]), threads)

    monkeypatch.setattr(decode.metal, "launcher", one_split_less)
    with (
        simulate("metal"),
        metal.settings(mode="checked"),
        pytest.raises(metal.SimulationError, match="decode_merge: read of .* nothing has written since it was alloc"),
    ):
        torch.ops.attnkit.sdpa_decode(args[0].clone(), *args[1:3], args[3], scale=0.5)
