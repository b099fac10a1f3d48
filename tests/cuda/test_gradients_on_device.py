"""Gradients on a GPU beside float64: attention by flash-attn-4's backward, the gated norm by ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.peers.test_attention_gradients import eager
from torch_attnkit.integrations import flash_attn_4
from torch_attnkit.oracle.compare import check

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with compute capability 9.0 or 10.x"),
]


def gated_norm(y: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w * nn.functional.silu(z)


@pytest.mark.seconds(600)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "options", [{}, dict(causal=True), dict(causal=True, window=100, scale=0.1), dict(window=40)], ids=str
)
def test_gradients_of_attention(D, options):
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    gen = torch.Generator().manual_seed(0)
    T, S, Hq, Hkv = 300, 500, 8, 2
    made = [torch.randn(2, n, h, D, generator=gen).bfloat16() for n, h in ((T, Hq), (S, Hkv), (S, Hkv), (T, Hq))]
    inputs, gradient = [t.cuda().requires_grad_() for t in made[:3]], made[3]
    flash_attn_4.flash_attention(*inputs, **options).backward(gradient.cuda())
    found = []
    for dtype in (torch.float32, torch.float64):
        copies = [t.to(dtype).requires_grad_() for t in made[:3]]
        eager(*copies, **options).backward(gradient.to(dtype))
        found.append([t.grad for t in copies])
    for name, t, ref, exact in zip("qkv", inputs, *found, strict=True):
        check(f"d{name}", t.grad.cpu(), ref.to(t.dtype), exact)


class Block(nn.Module):
    """Attention behind a gated norm, with weights of its own; ``ops`` says whether they run on the ops."""

    def __init__(self, ops: bool) -> None:
        super().__init__()
        self.ops = ops
        self.qkv = nn.Linear(256, 4 * 64 + 2 * 2 * 64, bias=False)
        self.gate, self.down = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x (B, T, 256)
        q, k, v = self.qkv(x).split((256, 128, 128), -1)
        q, k, v = (t.unflatten(-1, (-1, 64)) for t in (q, k, v))  # (B, T, heads, 64)
        attention, norm = (
            (flash_attn_4.flash_attention, torch.ops.attnkit.gated_rmsnorm)
            if self.ops
            else (
                eager,
                gated_norm,
            )
        )
        y = attention(q, k, v, causal=True).flatten(-2)  # (B, T, 256)
        y = norm(y, self.gate(x), self.weight)
        return x + self.down(y)


@pytest.mark.seconds(600)
def test_training_steps_of_a_small_model_are_eager_s():
    """Gradients of two layers after each of three steps: not farther from float64's than eager bfloat16's are."""
    pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    torch.manual_seed(0)
    first = nn.Sequential(Block(False), Block(False)).bfloat16()
    x, wanted = torch.randn(2, 2, 192, 256).bfloat16()
    models = {}
    for name, ops, dtype, device in (
        ("ops", True, torch.bfloat16, "cuda"),
        ("eager", False, torch.bfloat16, "cpu"),
        ("exact", False, torch.float64, "cpu"),
    ):
        model = nn.Sequential(Block(ops), Block(ops))
        model.load_state_dict(first.state_dict())
        models[name] = model.to(device, dtype).train()
    for _ in range(3):
        losses = {}
        for name, model in models.items():
            p = next(model.parameters())
            model.zero_grad()
            loss = (model(x.to(p)) - wanted.to(p)).float().square().mean()
            loss.backward()
            losses[name] = loss.item()
        for (what, ours), theirs, exact in zip(
            models["ops"].named_parameters(), models["eager"].parameters(), models["exact"].parameters(), strict=True
        ):
            check(f"gradient of {what}", ours.grad.cpu(), theirs.grad, exact.grad)
        ours, theirs, exact = (torch.tensor(losses[name], dtype=torch.float64) for name in models)
        check("loss", ours.bfloat16(), theirs.bfloat16(), exact)
        with torch.no_grad():  # all take the exact step, so that they stay at the same place
            for parameters in zip(*(m.parameters() for m in models.values()), strict=True):
                step = (parameters[-1] - 0.5 * parameters[-1].grad).bfloat16()
                for p in parameters:
                    p.copy_(step)
