"""The block formats in registers, in the simulator: every scale and element at and around every border of rounding."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.formats import e2m1, fp8, nvfp4
from torch_attnkit.oracle import fp4 as oracle

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
cutlass = pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
cute = pytest.importorskip("cutlass.cute")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

from cutlass import Float32  # noqa: E402

from torch_attnkit.cuda import fp4  # noqa: E402  imports cutlass
from torch_attnkit.sim import ptx  # noqa: E402

THREADS = 128
FORMATS = ("nvfp4", "mxfp4", "mxfp8")


@cute.kernel
def elements_kernel(codes: cute.Tensor, values: cute.Tensor, back: cute.Tensor, x: cute.Tensor):
    """Eight numbers a thread, as codes, as numbers, and the numbers of the codes."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    given = [x[8 * i + j] for j in range(8)]
    word = fp4.e2m1_codes(given, Float32(1))
    codes[i] = word
    for j in cutlass.range_constexpr(8):
        values[8 * i + j] = fp4.e2m1_round(given[j])
        back[8 * i + j] = fp4.e2m1_value(word >> (4 * j))


@cute.jit
def elements(codes: cute.Tensor, values: cute.Tensor, back: cute.Tensor, x: cute.Tensor):
    elements_kernel(codes, values, back, x).launch(grid=(cute.size(x) // (8 * THREADS), 1, 1), block=(THREADS, 1, 1))


def _scale(format: cutlass.Constexpr, top: Float32, gs: Float32):
    if format == "nvfp4":
        byte, value = fp4.nvfp4_scale(top, gs)
        return byte, value, fp4.nvfp4_factor(value, gs)
    byte, value = fp4.mxfp8_scale(top) if format == "mxfp8" else fp4.mxfp4_scale(top, format == "floor")
    return byte, value, fp4.ue8m0_reciprocal(byte)


@cute.kernel
def scales_kernel(
    bytes: cute.Tensor, values: cute.Tensor, factors: cute.Tensor, x: cute.Tensor, g: cute.Tensor,
    format: cutlass.Constexpr,
):  # fmt: skip
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    bytes[i], values[i], factors[i] = _scale(format, fp4.amax([x[i]]), g[i])


@cute.jit
def scales(
    bytes: cute.Tensor, values: cute.Tensor, factors: cute.Tensor, x: cute.Tensor, g: cute.Tensor,
    format: cutlass.Constexpr,
):  # fmt: skip
    scales_kernel(bytes, values, factors, x, g, format).launch(
        grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1)
    )


@cute.kernel
def trips_kernel(out: cute.Tensor, x: cute.Tensor, gs: Float32, format: cutlass.Constexpr, block: cutlass.Constexpr):
    """A block a thread, quantised and read back."""
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    given = [x[block * i + j] for j in range(block)]
    byte, scale, r = _scale(format, fp4.amax(given), gs)
    for j in cutlass.range_constexpr(0, block, 2):
        y = [fp4.times(given[j], r), fp4.times(given[j + 1], r)]
        if cutlass.const_expr(format == "mxfp8"):
            y = list(fp4.e4m3_values(fp4.e4m3_pair(y[0], y[1])))
        else:
            y = [fp4.e2m1_round(y[0]), fp4.e2m1_round(y[1])]
        for e in cutlass.range_constexpr(2):
            number = fp4.nvfp4_value(y[e], scale, gs if cutlass.const_expr(format == "nvfp4") else None)
            out[block * i + j + e] = number


@cute.jit
def trips(out: cute.Tensor, x: cute.Tensor, gs: Float32, format: cutlass.Constexpr, block: cutlass.Constexpr):
    trips_kernel(out, x, gs, format, block).launch(
        grid=(cute.size(x) // (block * THREADS), 1, 1), block=(THREADS, 1, 1)
    )


def _around(points: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Float32 numbers, and those within a few steps of each."""
    bits = points.float().view(torch.int32)
    return torch.cat([bits + d for d in range(-steps, steps + 1)]).view(torch.float32)


def _filled(x: torch.Tensor, count: int) -> torch.Tensor:
    padded = torch.ones(-(-x.numel() // count) * count)
    padded[: x.numel()] = x
    return padded


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; NaN is NaN."""
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


def _elements(x: torch.Tensor):
    x = _filled(x, 8 * THREADS)
    codes, values, back = torch.zeros(x.numel() // 8, dtype=torch.int32), torch.zeros_like(x), torch.zeros_like(x)
    ptx.run(ptx.compile(elements, codes, values, back, x, arch="sm90"), codes, values, back, x, check=True)
    return x, e2m1.unpack(codes.view(torch.uint8)), values, back


def test_elements_at_every_border():
    """Around midpoints and numbers of the format and around all powers of two, both signs, and what is no number."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    powers = torch.exp2(torch.arange(-126, 128).double()).float()
    near = _around(torch.cat([midpoints, torch.tensor(e2m1.VALUES[1:8]), powers[1:]]))
    tiny = torch.tensor([0, 1, 2, (1 << 23) - 1], dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([torch.inf, torch.nan, 1e38])
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    gen = torch.Generator().manual_seed(0)
    x = torch.cat([near, tiny, odd, nans, torch.rand(4000, generator=gen) * 7])
    x = torch.cat([x, (x.view(torch.int32) | -(1 << 31)).view(torch.float32)])
    x, codes, values, back = _elements(x)
    want = e2m1.encode(x)
    assert torch.equal(codes, want)
    assert _same(values, e2m1.decode(want)) and _same(back, e2m1.decode(want))


def _borders(format: str) -> torch.Tensor:
    """amax at which a scale changes, and their neighbours."""
    if format == "nvfp4":
        codes = fp8.e4m3_decode(torch.arange(127, dtype=torch.uint8)).double()
        points = torch.cat([codes[1:], (codes[1:] + codes[:-1]) / 2]) * 6
        return _around(points.float())
    limit = 448 if format == "mxfp8" else 6
    powers = torch.exp2(torch.arange(-126, 128).double())
    points = torch.cat([powers, (powers * limit / 256)[8:-8], powers[:-1] * 1.5])
    points = points.float()
    return _around(points[points.isfinite() & (points > 0)])


@pytest.mark.parametrize("format", [*FORMATS, "floor"])
def test_scales_at_every_border(format):
    """And for NVFP4 under 200 global scales, from the smallest numbers of float32 to the largest that is allowed."""
    gen = torch.Generator().manual_seed(0)
    tiny = torch.tensor([0, 1, 2, (1 << 23) - 1, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    x = torch.cat([_borders(format), tiny, torch.tensor([torch.inf, torch.nan, 1e-30, 6.0, 448.0])])
    g = torch.ones_like(x)
    if format == "nvfp4":
        some = torch.exp2(torch.rand(200, generator=gen) * 40 - 20)
        some[:6] = torch.tensor([1.0, nvfp4.GLOBAL_SCALE_MAX, 2.0**-126, 2.0**-149, 448 * 6, 1 / 3])
        x, g = (x / some[:, None]).flatten(), some[:, None].expand(-1, x.numel()).flatten()
    x = _filled(x, THREADS)
    g = _filled(g, THREADS)
    bytes, values, factors = torch.zeros(x.numel(), dtype=torch.int32), torch.zeros_like(x), torch.zeros_like(x)
    run = ptx.compile(scales, bytes, values, factors, x, g, format, arch="sm90")
    ptx.run(run, bytes, values, factors, x, g, check=True)
    top = x.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    if format == "nvfp4":
        want = fp8.e4m3_encode(top / torch.full_like(top, 6.0) * g)
        value = fp8.e4m3_decode(want)
        factor = torch.where(value == 0, 0.0, g / value)
    else:
        limit = fp8.E4M3_MAX if format == "mxfp8" else e2m1.MAX
        want = fp8.ue8m0_encode(top, limit, "floor" if format == "floor" else "ceil")
        value, factor = fp8.ue8m0_decode(want), fp8.ue8m0_reciprocal(want)
    assert torch.equal(bytes, want.int())
    assert _same(values, value) and _same(factors, factor)


@pytest.mark.parametrize("gs", [1.0, 731.37])
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_read_back(format, gs):
    gen = torch.Generator().manual_seed(1)
    block = oracle.BLOCK[format]
    x = oracle.spread(gen, torch.float32, 4 * THREADS, block)
    x[3], x[4, :4] = torch.nan, torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    x[5:9] = x[5:9] * 2.0**-128
    out, flat = torch.zeros(x.numel()), x.flatten()
    run = ptx.compile(trips, out, flat, Float32(gs), format, block, arch="sm90")
    ptx.run(run, out, flat, Float32(gs), check=True)
    want = oracle.round_trip(x, format, torch.tensor(gs) if format == "nvfp4" else None, torch.float32)
    assert _same(out, want.flatten())


@cute.kernel
def sixths_kernel(out: cute.Tensor, x: cute.Tensor):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    out[i] = fp4._sixth(x[i])


@cute.jit
def sixths(out: cute.Tensor, x: cute.Tensor):
    sixths_kernel(out, x).launch(grid=(cute.size(x) // THREADS, 1, 1), block=(THREADS, 1, 1))


def test_a_sixth_of_every_significand():
    """All of a binade, which says it for all whose quotients and remainders are normal, and the borders of the range
    that counts: the lowest binades, the highest, and infinity."""
    whole = torch.arange(1 << 23, dtype=torch.int32)
    gen = torch.Generator().manual_seed(0)
    some = torch.randint(0, 1 << 23, (1 << 12,), generator=gen, dtype=torch.int32)
    bits = [whole + (127 << 23), *(some + (e << 23) for e in (5, 6, 7, 253, 254))]
    x = _filled(torch.cat([torch.cat(bits).view(torch.float32), torch.tensor([0.0, torch.inf])]), THREADS)
    out = torch.zeros_like(x)
    ptx.run(ptx.compile(sixths, out, x, arch="sm90"), out, x)
    assert _same(out, x / torch.full_like(x, 6.0))
