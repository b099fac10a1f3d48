"""gated_rmsnorm against the gated norms of Qwen3-Next and Qwen3.5 in transformers.

In float32 both compute the same formula. In bf16 they differ by intent: transformers rounds the normalised value to
bf16 before the weight and the product with it again, this op rounds once at the store.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

op = torch.ops.attnkit.gated_rmsnorm
PEERS = pytest.mark.parametrize("peer", [Qwen3NextRMSNormGated, Qwen3_5RMSNormGated])
EPS = 1e-6


def _inputs(n, y_dtype, dtype, rows=64):
    gen = torch.Generator().manual_seed(n)
    y, z = (torch.randn(rows, n, generator=gen) for _ in range(2))
    return y.to(y_dtype), (2 * z).to(dtype), (1 + 0.3 * torch.randn(n, generator=gen)).to(dtype)


def _peer(peer, y, z, w):
    module = peer(w.numel(), eps=EPS)
    module.weight.data = w
    with torch.no_grad():
        return module(y, z)


def _exact(y, z, w):
    y, z, w = y.double(), z.double(), w.double()
    return y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * w * z * z.sigmoid()


@PEERS
@pytest.mark.parametrize("n", [1, 33, 128, 1000])
def test_float32_agrees_to_float32_rounding(peer, n):
    y, z, w = _inputs(n, torch.float32, torch.float32)
    exact = _exact(y, z, w)
    # n squares summed in any order, then a root, a sigmoid and a few products: at most n + 16 roundings.
    bound = (n + 16) * 2.0**-24 * exact.abs()
    for got in (op(y, z, w, eps=EPS), _peer(peer, y, z, w)):
        assert bool(((got.double() - exact).abs() <= bound).all())


@PEERS
def test_bf16_rounds_once_where_the_peer_rounds_three_times(peer):
    y, z, w = _inputs(128, torch.bfloat16, torch.bfloat16)
    exact, ours, theirs = _exact(y, z, w), op(y, z, w, eps=EPS), _peer(peer, y, z, w)
    assert theirs.dtype == ours.dtype == torch.bfloat16
    # The peer's result is the same formula with two more roundings, so nothing else differs.
    a = y.float()
    normed = (a * (a.square().mean(-1, keepdim=True) + EPS).rsqrt()).bfloat16()
    assert torch.equal(theirs, ((w * normed) * torch.nn.functional.silu(z.float())).bfloat16())
    assert not torch.equal(ours, theirs)
    our_error, their_error = ((t.double() - exact).abs() for t in (ours, theirs))
    assert our_error.sum() < their_error.sum() and our_error.max() <= their_error.max()
    half_step = exact.abs() * 2.0**-8  # one rounding of bf16, and what float32 lost before it
    assert bool((our_error <= half_step + (128 + 16) * 2.0**-24 * exact.abs()).all())
    assert bool((their_error > half_step * (1 + 2.0**-8)).any())


@PEERS
def test_float32_state_with_a_bf16_gate_is_the_peers_result_stored_in_bf16(peer):
    """The peer returns the dtype of y; the op returns that of the gate, as the layer after it expects."""
    y, z, w = _inputs(128, torch.float32, torch.bfloat16)
    exact, ours, theirs = _exact(y, z, w), op(y, z, w, eps=EPS), _peer(peer, y, z, w)
    assert theirs.dtype == torch.float32 and ours.dtype == torch.bfloat16
    bound = (128 + 16) * 2.0**-24 * exact.abs()
    assert bool(((theirs.double() - exact).abs() <= bound).all())
    assert bool(((ours.double() - theirs.double()).abs() <= 2.0**-8 * exact.abs() * (1 + 2.0**-8) + 2 * bound).all())
