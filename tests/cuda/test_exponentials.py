"""Exponentials as polynomials in the softmax of the Blackwell kernels: how exact, how many, and what they replace."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
cutlass = pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
cute = pytest.importorskip("cutlass.cute")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

from torch_attnkit.cuda.sm100 import exponentials  # noqa: E402  imports cutlass
from torch_attnkit.sim import ptx  # noqa: E402

THREADS = 128


@cute.kernel
def pairs_kernel(out: cute.Tensor, x: cute.Tensor):
    i = 2 * (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
    out[i], out[i + 1] = exponentials.exp2_pair((x[i], x[i + 1]))


@cute.jit
def pairs(out: cute.Tensor, x: cute.Tensor):
    pairs_kernel(out, x).launch(grid=(cute.size(x) // (2 * THREADS), 1, 1), block=(THREADS, 1, 1))


def _powers(x: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-x.numel() // (2 * THREADS)) * 2 * THREADS)
    padded[: x.numel()] = x
    out = torch.zeros_like(padded)
    ptx.run(ptx.compile(pairs, out, padded, arch="sm100"), out, padded, check=True)
    return out[: x.numel()]


def test_as_exact_as_the_instruction_that_they_replace():
    """ex2.approx.ftz.f32 has 2 ulp (PTX ISA); every binade from -126 to 8, densely around integers."""
    gen = torch.Generator().manual_seed(0)
    around = torch.arange(-126, 8)[:, None] + torch.tensor([0.0, 1e-7, 1e-3, 0.5, 1 - 1e-3, 1 - 6e-8])
    x = torch.cat([around.flatten(), torch.rand(40_000, generator=gen) * 134 - 126, torch.rand(9_000, generator=gen)])
    error = _powers(x).double() / torch.exp2(x.double()) - 1
    assert error.abs().max() < 2.0**-22
    assert error[-9_000:].mean().abs() < 2.0**-25  # sums do not drift


def test_what_a_mask_leaves_is_nothing():
    x = torch.tensor([-torch.inf, -1e38, -200.0, -127.0, -126.01, torch.nan, 0.0, 1.0])
    got = _powers(x)
    assert got[:5].tolist() == [0.0] * 5 and got[5].isnan() and got[6:].tolist() == [1.0, 2.0]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("dim", "eighths"), [(32, 2), (64, 2), (96, 2), (128, 1), (256, 0)])
def test_the_share_follows_from_the_model(dim, eighths):
    """And is what the kernel executes: 128 scores of each row and block, and a factor from the second block on."""
    assert exponentials.eighths(dim, dim) == eighths
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 512, 1, dim, generator=gen).bfloat16() for _ in range(3))
    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        torch.ops.attnkit.flash_attention(q, k, v)
    tiles, blocks, warps = 4, 4, 4
    wanted = tiles * warps * (blocks * 128 * (8 - eighths) // 8 + blocks - 1)
    assert sum(launch.counters["by_opcode"]["ex2"] for launch in launches) == wanted


def test_polynomials_lie_apart():
    """So that both pipes have work all the time."""
    for n in range(9):
        positions = [i for i in range(64) if exponentials.chosen(i, n)]
        assert len(positions) == 8 * n
        assert not positions or max(b - a for a, b in zip(positions, positions[1:], strict=False)) <= -(-8 // n)


def test_wider_operands_need_none():
    """Half the bits of an operand are half the tensor cores' time; twice as many are twice."""
    assert exponentials.eighths(128, 128, bits=32) == 0
    assert exponentials.eighths(128, 128, bits=8) == exponentials.eighths(64, 64)
