"""Every format function traces with symbolic sizes and reads no data on the host."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_attnkit.formats import fp8, kv_cache, mxfp4, nvfp4, rope, scale_layout


def through_nvfp4(x):
    gs = nvfp4.global_scale(x)
    packed, scale = nvfp4.quantize(x, gs)
    return packed, scale, nvfp4.dequantize(packed, scale, gs, x.dtype)


def through_fp8(x):
    codes, scale = fp8.quantize(x, rounding="floor")
    return codes, scale, fp8.dequantize(codes, scale, dtype=x.dtype)


def through_swizzle(x):
    scale = mxfp4.quantize(x)[1]
    swizzled = scale_layout.to_128x4(scale)
    return swizzled, scale_layout.from_128x4(swizzled, *scale.shape)


def through_rows(x):
    rows = kv_cache.encode_rows(x, "mxfp4", 64)
    return rows, kv_cache.decode_rows(rows, "mxfp4", x.shape[-1], 64)


def through_rope(x):
    cos = x[:, :16].cos()
    return (rope.apply(x, cos, cos, interleaved=True, inverse=True),)


# Float64 has bit arithmetic of its own; the half precisions add a cast to that of float32.
CASES = {
    "nvfp4": (through_nvfp4, torch.float32),
    "fp8": (through_fp8, torch.float64),
    "scale_layout": (through_swizzle, torch.float32),
    "kv_cache": (through_rows, torch.bfloat16),
    "rope": (through_rope, torch.bfloat16),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_traced_with_symbolic_sizes(name):
    run, dtype = CASES[name]
    gen = torch.Generator().manual_seed(0)
    traced = make_fx(run, tracing_mode="symbolic")(torch.ones(6, 128, dtype=dtype))
    # Another number of rows than it was traced with.
    x = torch.randn(131, 128, generator=gen).to(dtype)
    for got, expected in zip(traced(x), run(x), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
