"""The swizzled order of block scales against its formula, byte by byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit.formats import scale_layout

SHAPES = ((1, 1), (3, 4), (128, 4), (129, 5), (31, 7), (300, 9), (64, 448))


def offset(m: int, k: int, kb: int) -> int:
    tile = (m // 128) * -(-kb // 4) + k // 4
    return tile * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, shape, generator=gen, dtype=torch.uint8)


@pytest.mark.parametrize("m,kb", SHAPES)
def test_every_byte_is_where_the_formula_says(m, kb):
    scale = random_bytes(m, kb, seed=m)
    swizzled = scale_layout.to_128x4(scale)
    rows, cols = -(-m // 128) * 128, -(-kb // 4) * 4
    assert swizzled.shape == (rows, cols) == scale_layout.padded_shape(m, kb)
    assert swizzled.is_contiguous()
    expected = [0] * (rows * cols)
    for i, row in enumerate(scale.tolist()):
        for k, value in enumerate(row):
            expected[offset(i, k, kb)] = value
    assert swizzled.flatten().tolist() == expected
    assert torch.equal(scale_layout.from_128x4(swizzled, m, kb), scale)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(0, 400), st.integers(0, 20), st.integers(0, 2**31))
def test_inverse_and_batched(batch, m, kb, seed):
    scale = random_bytes(2, batch, m, kb, seed=seed)
    swizzled = scale_layout.to_128x4(scale)
    assert swizzled.shape == (2, batch, *scale_layout.padded_shape(m, kb))
    assert torch.equal(scale_layout.from_128x4(swizzled, m, kb), scale)
    for i in range(batch):
        assert torch.equal(swizzled[1, i], scale_layout.to_128x4(scale[1, i]))


def test_strided_inputs_and_no_aliasing():
    scale = random_bytes(8, 256, seed=5).T[::2]  # (128, 8)
    swizzled = scale_layout.to_128x4(scale)
    assert torch.equal(swizzled, scale_layout.to_128x4(scale.contiguous()))
    strided = torch.stack((swizzled, swizzled), dim=-1)[..., 1]
    linear = scale_layout.from_128x4(strided, 128, 8)
    assert torch.equal(linear, scale)
    linear.zero_()
    assert torch.equal(strided, swizzled)


def test_padding_is_zero():
    swizzled = scale_layout.to_128x4(torch.full((130, 5), 255, dtype=torch.uint8))
    assert int((swizzled == 255).sum()) == 130 * 5
    assert int((swizzled == 0).sum()) == 256 * 8 - 130 * 5


def test_refusals():
    with pytest.raises(TypeError, match="to_128x4: scale is torch.float32; accepted: torch.uint8"):
        scale_layout.to_128x4(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"scale has shape \(4,\); accepted: \(..., M, Kb\)"):
        scale_layout.to_128x4(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"shape \(128, 4\); accepted: \(..., 256, 4\) for M 129"):
        scale_layout.from_128x4(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)
    with pytest.raises(TypeError, match="from_128x4: swizzled is torch.int8"):
        scale_layout.from_128x4(torch.zeros(128, 4, dtype=torch.int8), 128, 4)
