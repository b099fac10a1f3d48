"""The fp4 kernels on Metal, bit for bit, also where arithmetic takes subnormal numbers for zero, as Apple GPUs do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.formats import nvfp4
from torch_attnkit.kernels.fp4.problem import BLOCK
from torch_attnkit.mps import library
from torch_attnkit.oracle import fp4
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(300)]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; NaN is NaN."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.view(kind) == b.view(kind)
    return bool((equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal).all())


def agrees(op: str, *args, **kwargs) -> None:
    """With the reference, on a machine that keeps subnormal numbers and on one that does not."""
    run = getattr(torch.ops.attnkit, op)
    want = run(*args, **kwargs)
    for flushed in (False, True):
        torch.set_flush_denormal(flushed)
        try:
            with torch_attnkit.simulate("metal"):
                got = run(*args, **kwargs)
        finally:
            torch.set_flush_denormal(False)
        got, wanted = ((t,) if isinstance(t, torch.Tensor) else t for t in (got, want))
        assert all(same(g, w) for g, w in zip(got, wanted, strict=True)), f"flushed: {flushed}"


def test_a_simulated_machine_can_flush_subnormal_numbers():
    """Or the tests below would not see what they are for."""
    kernel = metal.compile_shader(
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 2.0f; }"
    ).twice
    found = []
    for flushed in (False, True):
        x = torch.full((32,), 2.0**-130)
        torch.set_flush_denormal(flushed)
        try:
            kernel(x, threads=32, group_size=32)
        finally:
            torch.set_flush_denormal(False)
        found.append(x[0].item())
    assert found == [2.0**-129, 0.0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gs", [None, 731.37, nvfp4.GLOBAL_SCALE_MAX, 2.0**-126, 1e-40, 1.4e-45])
def test_every_code_under_every_nvfp4_scale(gs: float | None, dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8).repeat(1, 256)  # 32 times every scale
    scale = torch.arange(256, dtype=torch.uint8).expand(32, 256).contiguous()
    agrees("nvfp4_dequantize", codes, scale, None if gs is None else torch.tensor(gs), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_mxfp4_scale(dtype: torch.dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 256)
    scale = torch.arange(256, dtype=torch.uint8).expand(16, 256).contiguous()
    agrees("mxfp4_dequantize", codes, scale, dtype=dtype)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_ratio_of_bfloat16_to_amax(format: str):
    """Both have 128 significands; elements go down to a 32nd of amax, where codes are 0. So every tie is met."""
    block = BLOCK[format]
    significands = 1 + torch.arange(128) / 128
    values = torch.cat([significands * 2.0**e for e in range(-5, 1)])  # (768,)
    values = torch.nn.functional.pad(values, (0, -len(values) % (block - 1))).view(-1, block - 1)
    tops = 2 * significands.view(-1, 1, 1).expand(128, len(values), 1)
    x = torch.cat([values.expand(128, -1, -1), tops], -1).bfloat16()  # (128, n, block), amax last
    x[:, ::2] *= -1
    agrees(f"{format}_quantize", x.flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["ceil", "floor"])
def test_blocks_of_every_size_down_to_the_least_number(rounding: str, dtype: torch.dtype):
    """From 2^-149 in float32, 2^-133 in bfloat16; under scale bytes 0 to 2 subnormal numbers have codes."""
    powers = torch.arange(-149, 128).double().exp2()
    x = (powers[:, None] * torch.cat([torch.linspace(0, 1.99, 32), torch.linspace(-0.4, 0.1, 32)])).to(dtype)
    x[5, 3], x[-1, 40], x[-2, 0] = torch.nan, torch.inf, -torch.nan
    agrees("mxfp4_quantize", x, rounding=rounding)


@pytest.mark.parametrize("gs", [nvfp4.GLOBAL_SCALE_MAX, 2.0**60, 1.0, 2.0**-60, 3e-20, 5e-36, 1e-36, 1e-40, 1.9e-41])
def test_global_scales_of_every_size_on_blocks_of_every_size(gs: float):
    """Beside an infinity the ratio of a global scale and a block's can be subnormal; numbers near 2^128 have codes."""
    powers = torch.arange(-149, 128).double().exp2()
    x = (powers[:, None] * torch.cat([torch.linspace(0, 1.99, 16), torch.linspace(-1.99, 0.1, 16)])).float()
    infinite = x.clone()
    infinite[:, ::16] = torch.inf
    agrees("nvfp4_quantize", torch.cat([x, infinite]), torch.tensor(gs))


@pytest.mark.parametrize("gs", [5e-36, 3.3e-36, 2.1e-36, 1.1e-36])
def test_numbers_beside_the_midpoints_where_the_ratio_of_scales_is_subnormal(gs: float):
    """There the ratio has few bits, and which a number is multiplied by decides its code."""
    r = torch.tensor(gs) / 448
    assert 0 < r.item() < 2.0**-126
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = 1 + torch.arange(-120, 120).double() * 2.0**-24
    x = (midpoints[:, None] / r.double() * near).float().flatten()
    x = x[x.isfinite()]
    x = torch.nn.functional.pad(x, (0, -len(x) % 15)).view(-1, 15)
    agrees("nvfp4_quantize", torch.nn.functional.pad(x, (1, 0), value=torch.inf), torch.tensor(gs))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("dtype", "layout"), list(itertools.product(DTYPES, ("linear", "128x4"))), ids=str)
def test_all_edges(dtype: torch.dtype, layout: str):
    """Rows and columns beside the borders of (128, 4) tiles, odd offsets and room between rows, NaN and infinities."""
    gen = torch.Generator().manual_seed(0)
    for rows, k in ((129, 5 * 32), (127, 9 * 32), (3, 1024)):
        x = fp4.spread(gen, dtype, rows, k + 24)[:, 3 : k + 3]
        x[0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
        x[2] = torch.nan
        gs = torch.tensor(731.37)
        agrees("nvfp4_quantize", x, gs, scale_layout=layout)
        codes, scale = torch.ops.attnkit.nvfp4_quantize(x, gs, scale_layout=layout)
        padded = torch.full((rows, k // 2 + 7), 0xFF, dtype=torch.uint8)
        padded[:, 5 : k // 2 + 5] = codes
        agrees("nvfp4_dequantize", padded[:, 5 : k // 2 + 5], scale, gs, scale_layout=layout, dtype=dtype)


def test_scales_that_do_not_lie_together():
    """The matrix of 128x4 scales as a view with room between its rows."""
    codes, scale = torch.ops.attnkit.nvfp4_quantize(torch.randn(130, 80), scale_layout="128x4")
    padded = torch.full((scale.shape[0], scale.shape[1] + 5), 0x7F, dtype=torch.uint8)
    padded[:, 2:-3] = scale
    agrees("nvfp4_dequantize", codes, padded[:, 2:-3], scale_layout="128x4")


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize(("format", "dim", "pairs"), [("nvfp4", 48, 9), ("mxfp4", 96, 13), ("mxfp4", 64, 32)])
def test_blocks_that_are_rotated_in_part_keep_the_rest(
    format: str, dim: int, pairs: int, layout: str, dtype: torch.dtype
):
    """Infinities and NaN beside the pairs, tokens beside the border of a tile, heads in groups, room between rows."""
    gen = torch.Generator().manual_seed(0)
    o = fp4.spread(gen, dtype, 129, 3, dim + 8)[:, :, 5 : dim + 5]
    o[0, 0, :3] = torch.tensor((torch.nan, torch.inf, -torch.inf))
    angle = 6.28 * torch.rand(129, pairs, generator=gen)
    gs = torch.tensor(731.37) if format == "nvfp4" else None
    agrees("inverse_rope_fp4", o, angle.cos(), angle.sin(), gs, groups=3, format=format, scale_layout=layout)


def test_pairs_are_not_fused():
    """Where a cos + b sin cancels, a product that was not rounded would show: most codes of a block hang on that."""
    gen = torch.Generator().manual_seed(1)
    a, b = (1 + torch.rand(64, 2, 16, generator=gen) for _ in range(2))
    angle = torch.atan2(-a, b)[:, 0]
    o = torch.stack((a, b), -1).flatten(-2)
    o[:, 1] = o[:, 0]
    agrees("inverse_rope_fp4", o, angle.cos(), angle.sin(), format="mxfp4")


def _sources() -> Iterator[tuple[str, dict[str, object]]]:
    for dtype, swizzled in zip(DTYPES, (True, False, False), strict=True):
        flat = dict(TYPE=dtype, SWIZZLED=swizzled, FLAT=not swizzled, RANK=2)
        for format, block in BLOCK.items():
            yield f"{format}_quantize", flat | dict(BLOCK=block, DOWN=swizzled, WIDTH=8, WORDS=1)
            heads = dict(ANGLE_TYPE=torch.float32, DIM=64, PAIRS=5, WIDTH=8, WORDS=1)
            yield "inverse_rope_fp4", flat | heads | dict(BLOCK=block)
            yield f"{format}_dequantize", flat | dict(BLOCK=block, GLOBAL=swizzled, PITCHED=1, WIDTH=1, WORDS=0)


@pytest.mark.proof
def test_nothing_is_known_to_keep_apples_compiler_from_the_sources():
    for op, defines in _sources():
        assert [str(f) for f in lint(library.source(op, defines))] == []


@pytest.mark.parametrize(
    ("op", "read", "written"), [("nvfp4_quantize", 2.0, 0.5 + 1 / 16), ("mxfp4_quantize", 2.0, 0.5 + 1 / 32)]
)
def test_every_number_crosses_the_bus_once(op: str, read: float, written: float):
    x = torch.randn(64, 512).bfloat16()
    dispatch._PLANS[op].clear()
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        getattr(torch.ops.attnkit, op)(x)
    (report,) = reports
    assert report.buffers["x"][0] == x.numel() * read
    assert sum(report.buffers[name][1] for name in ("codes", "scales")) == x.numel() * written
