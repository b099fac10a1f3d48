"""Products of groups on Metal: borders of tiles, rows that no vector can read, NaN, all FP4 numbers, what is read."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.formats import e2m1
from torch_attnkit.kernels.batched_gemm import metal as products
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
op = torch.ops.attnkit.grouped_output_projection


def simulated(*args, **kwargs) -> torch.Tensor:
    with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
        return op(*args, **kwargs)


def integers(*shape: int) -> torch.Tensor:
    """Numbers whose products and sums are exact in float32 and in bfloat16."""
    return torch.randint(-1, 2, shape).bfloat16()


def inside(t: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """``t`` in a buffer of NaN, with so many elements before and after each row."""
    buffer = torch.full((*(n + 1 for n in t.shape[:-1]), before + t.shape[-1] + after), torch.nan, dtype=t.dtype)
    view = buffer[tuple(slice(0, n) for n in t.shape[:-1])][..., before : before + t.shape[-1]]
    return view.copy_(t)


@pytest.mark.sample(6)
@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 33, 129])
def test_tiles_have_borders_and_nothing_beyond_the_operands_is_read(tokens: int):
    for k, n in ((128, 32), (132, 129), (60, 5)):
        o, w = integers(tokens, 2, k), integers(2, n, k)
        got = simulated(inside(o, 0, 8), inside(w, 8, 0))
        assert torch.equal(got, torch.einsum("tgk,grk->tgr", o.float(), w.float()).bfloat16())


@pytest.mark.proof
@pytest.mark.parametrize(("before", "after", "k"), [(0, 0, 27), (1, 2, 64), (8, 5, 64), (4, 4, 1)])
def test_rows_that_no_vector_can_read(before: int, after: int, k: int):
    o, w = integers(5, 3, k), integers(3, 10, k)
    want = torch.einsum("tgk,grk->tgr", o.float(), w.float()).half()
    assert torch.equal(simulated(inside(o, before, after), w, dtype=torch.float16), want)
    assert torch.equal(simulated(o, inside(w, before, after), dtype=torch.float16), want)


@pytest.mark.proof
def test_nan_stays_in_its_row_and_its_column():
    o, w = integers(20, 2, 64), integers(2, 12, 64)
    o[3, 0, 5], w[1, 7, 9] = torch.nan, torch.nan
    want = torch.zeros(20, 2, 12, dtype=torch.bool)
    want[3, 0], want[:, 1, 7] = True, True
    assert torch.equal(simulated(o, w).isnan(), want)


@pytest.mark.proof
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_code_under_every_scale_is_exact_on_both_sides(format: str):
    """One number of a row is not zero: number 0 of x is 1, number 0 of row n of the weights is a code under a scale;
    and the other way round. Left out are scales under which bfloat results are infinite or not normal."""
    block, one = (16, 0x38) if format == "nvfp4" else (32, 127)
    codes = torch.arange(16).repeat_interleave(256)
    scales = torch.arange(256).repeat(16)
    kept = (scales % 128 < 127) if format == "nvfp4" else (scales > 1) & (scales < 252)
    codes, scales = codes[kept].to(torch.uint8), scales[kept].to(torch.uint8)
    n = len(codes)
    many = torch.zeros(n, 1, block // 2, dtype=torch.uint8)
    many[:, 0, 0] = codes
    single = torch.zeros(1, 1, block // 2, dtype=torch.uint8)
    single[0, 0, 0] = 2  # 1.0
    unit = torch.full((1, 1, 1), one, dtype=torch.uint8)
    given = dict(format=format, dtype=torch.bfloat16)
    if format == "nvfp4":
        powers = scales.view(torch.float8_e4m3fn).double()
    else:
        powers = torch.exp2(scales.double() - 127)
    want = (e2m1.decode(codes, torch.float64) * powers).bfloat16()
    got = simulated(single, many.transpose(0, 1).contiguous(), unit, scales.view(1, n, 1), **given)
    assert torch.equal(got.view(-1), want)
    got = simulated(many, single, scales.view(n, 1, 1), unit, **given)
    assert torch.equal(got.view(-1), want)


@pytest.mark.proof
def test_weights_of_few_tokens_are_read_once():
    o, w = integers(20, 2, 256), integers(2, 64, 256)
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        op(o, w)
    (report,) = reports
    assert report.buffers["w"] == (w.nbytes, 0) and report.buffers["x"] == (o.nbytes, 0)


def test_tokens_are_cut_so_that_chunks_fit_in_threadgroup_memory():
    cuts = [products.cut_of(tokens) for tokens in (1, 8, 9, 16, 17, 24, 32, 128, 4096)]
    assert [(c.rows, c.columns) for c in cuts] == [(1, 1)] * 2 + [(2, 2)] * 2 + [(2, 4)] * 3 + [(4, 4)] * 2
    assert all(products.threadgroup_bytes(c) <= 32768 for c in cuts)
