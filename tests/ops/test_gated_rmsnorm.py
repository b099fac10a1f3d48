"""gated_rmsnorm: what a norm and a gate must hold whatever the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_attnkit import simulate

op = torch.ops.attnkit.gated_rmsnorm
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _formula(y, z, w, eps):
    """The contract number by number in Python's floats, one row at a time."""
    rows = []
    for a, g in zip(
        y.double().reshape(-1, y.shape[-1]).tolist(), z.double().reshape(-1, y.shape[-1]).tolist(), strict=True
    ):
        r = 1 / math.sqrt(sum(v * v for v in a) / len(a) + eps)
        rows.append(
            [wv * v * r * gv / (1 + math.exp(-gv)) for wv, v, gv in zip(w.double().tolist(), a, g, strict=True)]
        )
    return torch.tensor(rows, dtype=torch.float64).reshape(y.shape)


def _within(got, exact, n):
    """One rounding at the store, and before it at most n + 16 float32 roundings (n squares, then a few products)."""
    relative = torch.finfo(got.dtype).eps / 2 + (n + 16) * torch.finfo(torch.float32).eps / 2
    smallest = torch.finfo(got.dtype).smallest_normal
    assert bool(((got.double() - exact).abs() <= relative * exact.abs() + smallest).all())


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    n=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    wide_y=st.booleans(),
    wide_w=st.booleans(),
    eps=st.sampled_from((1e-6, 1e-2)),
    seed=st.integers(0, 2**20),
)
def test_equals_the_formula_for_any_batch_and_width(batch, n, dtype, wide_y, wide_w, eps, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randn(*batch, n, generator=gen).to(torch.float32 if wide_y else dtype)
    z = (3 * torch.randn(*batch, n, generator=gen)).to(dtype)
    w = torch.randn(n, generator=gen).to(torch.float32 if wide_w else dtype)
    out = op(y, z, w, eps=eps)
    assert out.shape == z.shape and out.dtype == dtype
    _within(out, _formula(y, z, w, eps), n)


def test_a_gate_of_zero_closes_and_a_large_gate_passes_z_through():
    y, w = torch.randn(4, 32), torch.randn(32)
    assert torch.equal(op(y, torch.zeros(4, 32), w).abs(), torch.zeros(4, 32))
    wide = op(y, torch.full((4, 32), 64.0), w)
    _within(wide, _formula(y, torch.full((4, 32), 64.0), w, 1e-6), 32)


def test_the_norm_forgets_the_scale_of_y():
    y, z, w = torch.randn(3, 48), torch.randn(3, 48), torch.randn(48)
    # A power of two changes no significand, and eps is far below both mean squares.
    assert torch.equal(op(y * 1024, z, w, eps=1e-30), op(y, z, w, eps=1e-30))


def test_a_row_of_zeros_gives_zeros():
    assert torch.equal(op(torch.zeros(2, 5), torch.randn(2, 5), torch.ones(5)).abs(), torch.zeros(2, 5))


def test_bf16_output_of_float32_state_is_rounded_once():
    y, z, w = torch.randn(64, 128), torch.randn(64, 128).bfloat16(), torch.randn(128).bfloat16()
    exact = _formula(y, z, w, 1e-6)
    rounded = exact.to(torch.bfloat16)
    out = op(y, z, w)
    # They may differ only where float32 arithmetic crosses a rounding boundary of bf16: rarely, and by one step.
    differ = out != rounded
    assert differ.float().mean() < 2**-8
    assert bool(((out.double() - rounded.double()).abs() <= rounded.double().abs() * 2**-7).all())


def test_rows_are_independent_and_strides_do_not_matter():
    y, z, w = torch.randn(6, 3, 20), torch.randn(6, 3, 20), torch.randn(20)
    want = _formula(y, z, w, 1e-6)
    buffer = torch.full((3, 6, 40), torch.nan)
    strided = buffer.transpose(0, 1)[..., 8:28]
    strided.copy_(y)
    _within(op(strided, z, w), want, 20)
    _within(op(y[2:3], z[2:3], w), want[2:3], 20)
    _within(op(y[4, 1], z[4, 1], w), want[4, 1], 20)


def test_inputs_are_unchanged_and_not_aliased():
    y, z, w = torch.randn(2, 8), torch.randn(2, 8), torch.ones(8)
    before = [t.clone() for t in (y, z, w)]
    out = op(y, z, w)
    out.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip(before, (y, z, w), strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_empty_batches_give_empty_outputs(shape):
    assert op(torch.zeros(shape), torch.zeros(shape), torch.ones(8)).shape == shape


def test_refusals_name_op_argument_found_and_accepted():
    y, z, w = torch.randn(2, 8), torch.randn(2, 8).bfloat16(), torch.ones(8)
    with pytest.raises(ValueError, match=r"gated_rmsnorm: N must be at least 1 \(got N=0\)"):
        op(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(0))
    for eps in (0.0, -1e-6):
        with pytest.raises(ValueError, match="gated_rmsnorm: eps must be positive"):
            op(y, z, w, eps=eps)
    with pytest.raises(ValueError, match=r"gated_rmsnorm: w must be \(N\), got shape \(7,\): N=7, but y has N=8"):
        op(y, z, w[:7])
    with pytest.raises(ValueError, match=r"gated_rmsnorm: z has batch axes \(3,\), but y has \(2,\)"):
        op(y, torch.randn(3, 8).bfloat16(), w)
    with pytest.raises(TypeError, match="gated_rmsnorm: y is f16, accepted: f32.*bf16"):
        op(y.half(), z, w)
    with pytest.raises(TypeError, match="gated_rmsnorm: z is i64, accepted: f32, bf16, f16, f64"):
        op(y, z.long(), w)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_small_gates_keep_their_digits(arch):
    """e^-z of a large z shows the rounding of z * log2(e) z times as large, unless it is put back."""
    z = torch.linspace(-80, -10, 71)[:, None]
    one = torch.ones(1)
    with simulate(arch):
        out = op(torch.ones_like(z), z, one, eps=1e-30)
    exact = z.double() * torch.sigmoid(z.double())
    # Seen 1.2 eps; 40 without, half an eps of the exponent 80.
    assert ((out.double() - exact) / exact).abs().max() < 4 * torch.finfo(torch.float32).eps
