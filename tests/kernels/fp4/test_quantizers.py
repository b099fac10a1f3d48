"""The fp4 kernels in the simulator, bit for bit: what a tolerance of parity would forgive, and plans of large calls."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.formats import nvfp4
from torch_attnkit.kernels.fp4 import plan
from torch_attnkit.oracle import fp4

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("linear", "128x4")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; NaN is NaN."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.view(kind) == b.view(kind)
    return bool((equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal).all())


def _agrees(op: str, *args, **kwargs) -> None:
    run = getattr(torch.ops.attnkit, op)
    want = run(*args, **kwargs)
    with torch_attnkit.simulate("sm90"):
        got = run(*args, **kwargs)
    want, got = ((t,) if isinstance(t, torch.Tensor) else t for t in (want, got))
    assert all(_same(g, w) for g, w in zip(got, want, strict=True))


@pytest.fixture(params=["small", "large"])
def plans(request, monkeypatch):
    """Both ways to spread blocks, whatever the size of a call."""
    monkeypatch.setattr(plan, "_SMALL", 1 << 60 if request.param == "small" else 0)
    for op in ("nvfp4_quantize", "nvfp4_dequantize", "mxfp4_quantize", "mxfp4_dequantize"):
        torch_attnkit.core.dispatch._PLANS[op].clear()
    yield
    for op in ("nvfp4_quantize", "nvfp4_dequantize", "mxfp4_quantize", "mxfp4_dequantize"):
        torch_attnkit.core.dispatch._PLANS[op].clear()


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gs", [None, 1.0, 731.37, 1 / 3, nvfp4.GLOBAL_SCALE_MAX, 2.0**-126])
def test_every_code_under_every_nvfp4_scale(gs, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8).repeat(1, 256)  # 32 times every scale
    scale = torch.arange(256, dtype=torch.uint8).expand(32, 256).contiguous()
    _agrees("nvfp4_dequantize", codes, scale, None if gs is None else torch.tensor(gs), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_mxfp4_scale(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 256)
    scale = torch.arange(256, dtype=torch.uint8).expand(16, 256).contiguous()
    _agrees("mxfp4_dequantize", codes, scale, dtype=dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_plans_and_all_edges(plans, dtype, layout):
    """Rows and columns beside the borders of (128, 4) tiles, more blocks than a CTA has, NaN and infinities."""
    gen = torch.Generator().manual_seed(0)
    for rows, k in ((129, 5 * 32), (127, 9 * 32), (3, 1024)):
        x = fp4.spread(gen, dtype, rows, k)
        x[0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
        x[1, ::7] = -torch.nan
        x[2] = torch.nan
        gs = torch.tensor(731.37)
        _agrees("nvfp4_quantize", x, gs, scale_layout=layout)
        _agrees("nvfp4_dequantize", *torch.ops.attnkit.nvfp4_quantize(x, gs, scale_layout=layout), gs,
                scale_layout=layout, dtype=dtype)  # fmt: skip
        for rounding in ("ceil", "floor"):
            _agrees("mxfp4_quantize", x, scale_layout=layout, rounding=rounding)
        _agrees("mxfp4_dequantize", *torch.ops.attnkit.mxfp4_quantize(x, scale_layout=layout), scale_layout=layout,
                dtype=dtype)  # fmt: skip


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_ratio_of_bfloat16_to_amax(format):
    """Both have 128 significands; elements go down to a 32nd of amax, where codes are 0. So every tie is met."""
    block = fp4.BLOCK[format]
    significands = 1 + torch.arange(128) / 128
    values = torch.cat([significands * 2.0**e for e in range(-5, 1)])  # (768,)
    values = torch.nn.functional.pad(values, (0, -len(values) % (block - 1))).view(-1, block - 1)
    tops = 2 * significands.view(-1, 1, 1).expand(128, len(values), 1)
    x = torch.cat([values.expand(128, -1, -1), tops], -1).bfloat16()  # (128, n, block), amax last
    x[:, ::2] *= -1
    _agrees(f"{format}_quantize", x.flatten(1))


def test_scales_that_do_not_lie_together():
    """The matrix of 128x4 scales as a view with room between its rows."""
    gen = torch.Generator().manual_seed(0)
    codes, scale = torch.ops.attnkit.nvfp4_quantize(torch.randn(130, 80, generator=gen), scale_layout="128x4")
    padded = torch.full((scale.shape[0], scale.shape[1] + 5), 0x7F, dtype=torch.uint8)
    padded[:, 2:-3] = scale
    _agrees("nvfp4_dequantize", codes, padded[:, 2:-3], scale_layout="128x4")
