"""Gradients of flash_attention through flash-attn-4's backward, both in the PTX simulator, beside float64."""

from __future__ import annotations

import builtins

import pytest
import torch

from torch_attnkit import UnsupportedError, simulate
from torch_attnkit.integrations import flash_attn_4
from torch_attnkit.oracle.compare import check

GIVEN = [torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(3)]


def eager(q, k, v, *, scale=None, causal=False, window=-1):
    T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = torch.arange(S) - (torch.arange(T)[:, None] + S - T)  # (T, S) keys beside their query
    seen = torch.ones(T, S, dtype=torch.bool)
    seen &= at <= 0 if causal else True
    seen &= (at.abs() < window) if window >= 0 else True
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.proof
@pytest.mark.simulator
@pytest.mark.seconds(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arch", "sizes", "options"),
    [
        ("sm90", (128, 128, 4, 2, 64), dict(causal=True)),
        ("sm90", (100, 150, 2, 2, 128), dict(causal=True, window=40, scale=0.1)),
        ("sm90", (100, 150, 2, 2, 64), dict(window=40)),
        ("sm100", (128, 200, 2, 1, 128), {}),
        ("sm100", (128, 128, 2, 2, 64), dict(causal=True, window=40)),
    ],
)
def test_gradients_are_those_of_the_definition(arch, sizes, options, monkeypatch):
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    from torch_attnkit.sim import ptx

    monkeypatch.setattr(flash_attn_4, "_DEVICES", ("cpu",))
    T, S, Hq, Hkv, D = sizes
    shapes = ((1, T, Hq, D), (1, S, Hkv, D), (1, S, Hkv, D))
    inputs = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
    gradient = torch.randn(1, T, Hq, D).bfloat16()
    with simulate(arch), ptx.device(arch, check=True, seed=1):
        flash_attn_4.flash_attention(*inputs, **options).backward(gradient)
    found = []
    for dtype in (torch.float32, torch.float64):
        copies = [t.detach().to(dtype).requires_grad_() for t in inputs]
        eager(*copies, **options).backward(gradient.to(dtype))
        found.append([t.grad for t in copies])
    for name, t, ref, exact in zip("qkv", inputs, *found, strict=True):
        check(f"{arch} d{name}", t.grad, ref.to(t.dtype), exact)


def test_without_gradients_it_is_the_op():
    q, k, v = (torch.randn(1, 5, 2, 32) for _ in range(3))
    got = flash_attn_4.flash_attention(q, k, v, causal=True, window=2)
    assert torch.equal(got, torch.ops.attnkit.flash_attention(q, k, v, causal=True, window=2)[0])


def refused(message: str, *inputs: torch.Tensor, **options) -> None:
    with pytest.raises(UnsupportedError, match=message):
        flash_attn_4.flash_attention(inputs[0].clone().requires_grad_(), *inputs[1:], **options)


def test_what_the_backward_was_not_run_with_is_refused(monkeypatch):
    q, k, v = GIVEN
    refused("q is on cpu, accepted: a Hopper or Blackwell GPU; elsewhere use torch.nn.functional", q, k, v)
    refused("q is torch.float32 with D=64, accepted: bfloat16", q.float(), k.float(), v.float())
    refused("v is torch.bfloat16 with D=32", q, k, v[..., :32])
    monkeypatch.setattr(flash_attn_4, "_DEVICES", ("cpu",))
    refused("window is 0", q, k, v, window=0)
    refused("with 4 queries and 3 keys", q, k[:, :3], v[:, :3], causal=True)
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("flash_attn"):
            raise ImportError("No module named 'flash_attn'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused("flash-attn-4 cannot be imported .*, accepted: pip install flash-attn-4", q, k, v)


def test_the_arguments_of_the_backward(monkeypatch):
    """What flash-attn-4 is handed, without running it."""
    seen = {}

    def backward(q, k, v, out, grad, lse, **options):
        seen.update(options, lse=lse)
        return q + 1, k + 2, v + 3

    monkeypatch.setattr(flash_attn_4, "_DEVICES", ("cpu",))
    monkeypatch.setattr(flash_attn_4, "_backward", lambda: backward)
    q, k, v = (torch.randn(1, 4, 2, 64).bfloat16() for _ in range(3))
    q.requires_grad_()
    v.requires_grad_()
    for causal, window, expected in (
        (True, -1, (True, None, None)),
        (True, 3, (False, 2, 0)),
        (False, 3, (False, 2, 2)),
    ):
        q.grad = v.grad = None
        flash_attn_4.flash_attention(q, k, v, causal=causal, window=window, scale=0.5).sum().backward()
        assert (seen["causal"], seen["window_size_left"], seen["window_size_right"]) == expected
        assert seen["softmax_scale"] == 0.5 and seen["deterministic"] is False
        lse = torch.ops.attnkit.flash_attention(q.detach(), k, v.detach(), causal=causal, window=window, scale=0.5)[1]
        assert torch.equal(seen["lse"], lse.transpose(1, 2)) and seen["lse"].is_contiguous()
        assert torch.equal(q.grad, q.detach() + 1) and torch.equal(v.grad, v.detach() + 3) and k.grad is None
