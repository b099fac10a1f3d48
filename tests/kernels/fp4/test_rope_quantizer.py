"""inverse_rope_fp4 in the simulator, to the bit, and how the blocks of heads are numbered."""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.fp4 import plan
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.inverse_rope_fp4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _agrees(*args, **kwargs):
    want = op(*args, **kwargs)
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True), ptx.counting() as launches:
        got = op(*args, **kwargs)
    assert len(launches) == 1
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    return launches[0]


def _inputs(tokens: int, heads: int, dim: int, pairs: int, dtype: torch.dtype):
    """Heads of every size with odd numbers; angles between which both products of a pair matter."""
    o = torch.randn(tokens, heads, dim) * torch.exp2(torch.randint(-9, 9, (tokens, heads, 1)).float())
    o[0, 0, ::9] = torch.tensor(torch.nan)
    o[0, -1, -3:] = torch.tensor((torch.inf, -torch.inf, 0.0))
    o[-1, 0] = -0.0
    angle = 7 * torch.rand(tokens, pairs)
    return o.to(dtype), angle.cos(), angle.sin()


@pytest.fixture(params=["few", "many"])
def plans(request, monkeypatch):
    """Both ways to spread blocks, whatever the size of a call."""
    monkeypatch.setattr(plan, "_SMALL", 1 << 60 if request.param == "few" else 0)
    torch_attnkit.core.dispatch._PLANS["inverse_rope_fp4"].clear()
    yield
    torch_attnkit.core.dispatch._PLANS["inverse_rope_fp4"].clear()


@pytest.mark.sample(23)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("dim", "pairs"), [(512, 32), (96, 5), (64, 32), (160, 40), (32, 0)])
def test_blocks_that_are_rotated_in_whole_in_part_or_not(plans, dim, pairs, format, dtype, layout):
    gs = torch.tensor(731.37) if format == "nvfp4" else None
    o, cos, sin = _inputs(5, 6, dim, pairs, dtype)
    _agrees(o, cos, sin, gs, groups=3, format=format, scale_layout=layout)
    _agrees(o[:1], cos[:1].to(dtype), sin[:1].to(dtype), gs, groups=2, format=format, scale_layout=layout)


def test_a_pair_that_is_not_rotated_keeps_its_sign_and_its_infinity():
    o = torch.tensor((-0.0, torch.inf)).repeat(16).view(1, 1, 32)
    _agrees(o, torch.ones(1, 3), torch.zeros(1, 3), format="mxfp4")


def test_heads_and_angles_that_vectors_do_not_fit():
    o, cos, sin = _inputs(4, 3, 64, 16, torch.bfloat16)
    wide, angles = torch.zeros(4, 3, 67, dtype=torch.bfloat16), torch.zeros(4, 37)
    wide[..., 1:65], angles[:, 3:19], angles[:, 20:36] = o, cos, sin
    _agrees(wide[..., 1:65], angles[:, 3:19], angles[:, 20:36])


@pytest.mark.parametrize(
    ("block", "dim", "pairs"), [(16, 512, 32), (32, 512, 32), (16, 96, 5), (32, 64, 32), (16, 32, 0)]
)
def test_sections_number_every_block_once_and_no_warp_has_both_kinds(block, dim, pairs):
    kb, rotated = dim // block, -(-2 * pairs // block)
    section = plan.rotation(block, kb, pairs, plan.Config(8, 128, 1, False), 4).section
    still, blocks = kb - rotated, []
    for j in range(section * kb):  # as ``place`` of the kernel
        last = j - section * still
        blocks.append((j // still, j % still) if last < 0 else (last // rotated, still + last % rotated))
    assert sorted(blocks) == list(itertools.product(range(section), range(kb)))
    for first in range(0, len(blocks), 32):
        assert len({k >= still for _, k in blocks[first : first + 32]}) == 1


@pytest.mark.parametrize(("format", "most"), [("nvfp4", 320), ("mxfp4", 500)])
def test_a_block_takes_few_instructions(format, most):
    """Of PTX, for the blocks of a warp, rotated or not. Seen: 312, 489; docs/lab/fp4.md counts the machine code."""
    heads = 64
    o = torch.randn(2, heads, 512).bfloat16()
    angle = torch.rand(2, 32)
    launch = _agrees(o, angle.cos(), angle.sin(), format=format)
    warps = 2 * heads * 512 // {"nvfp4": 16, "mxfp4": 32}[format] // 32
    assert launch.counters["instructions"] <= warps * most
