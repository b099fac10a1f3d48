"""Gradients of gated_rmsnorm: the formula, autograd's way to it, and a training step beside eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_attnkit
from torch_attnkit import simulate
from torch_attnkit.ops.gated_rmsnorm.reference import reference as forward

ops = torch.ops.attnkit
NAMES = ("y", "z", "w")


def tensors(*batch: int, n: int = 9, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((*batch, n), (*batch, n), (n,))
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_numbers_and_autograd_agree_in_float64(batch, eps):
    y, z, w = tensors(*batch)
    call = lambda *args: ops.gated_rmsnorm(*args, eps=eps)
    assert torch.autograd.gradcheck(call, (y, z, w))
    grad = torch.randn(*batch, 9, dtype=torch.float64)
    want = torch.autograd.grad(forward(y, z, w, eps), (y, z, w), grad)
    got = torch.autograd.grad(call(y, z, w), (y, z, w), grad)
    for name, g, e in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("wanted", [("y",), ("z",), ("w",), ("y", "w")])
def test_only_what_is_asked_for_gets_a_gradient(wanted):
    given = dict(zip(NAMES, tensors(4), strict=True))
    for name, tensor in given.items():
        tensor.requires_grad_(name in wanted)
    ops.gated_rmsnorm(*given.values()).sum().backward()  # a gradient of one number, expanded
    for name, tensor in given.items():
        assert (tensor.grad is not None) == (name in wanted)
    whole = tensors(4)
    forward(*whole).sum().backward()
    for name in wanted:
        torch.testing.assert_close(given[name].grad, dict(zip(NAMES, whole, strict=True))[name].grad)


def test_gradients_have_the_dtypes_of_their_tensors():
    y, z, w = tensors(2, 3)
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    given = [t.detach().to(d).requires_grad_() for t, d in zip((y, z, w), dtypes, strict=True)]
    out = ops.gated_rmsnorm(*given)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and [t.grad.dtype for t in given] == [t.dtype for t in given]


def test_there_is_no_second_derivative_and_no_transform():
    y, z, w = tensors(2)
    (dy,) = torch.autograd.grad(ops.gated_rmsnorm(y, z, w).sum(), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="gated_rmsnorm_backward has no backward"):
        dy.sum().backward()
    with pytest.raises(
        NotImplementedError,
        match="gated_rmsnorm: y requires a gradient, but the op has a backward for torch.autograd alone",
    ):
        torch.func.grad(lambda y: ops.gated_rmsnorm(y, z.detach(), w.detach()).sum())(y.detach())


@pytest.mark.simulator
@pytest.mark.parametrize("arch", ["metal", pytest.param("sm90", marks=pytest.mark.proof)])
def test_autograd_calls_the_kernel_and_the_same_call_gives_the_same_bits(arch):
    shapes = ((70, 3, 40), (70, 3, 40), (40,))  # more rows than are worked on side by side
    found = []
    for _ in range(2):
        gen = torch.Generator().manual_seed(1)
        given = [torch.randn(s, generator=gen).requires_grad_() for s in shapes]
        with simulate(arch), torch_attnkit.record() as ran:
            ops.gated_rmsnorm(*given).square().sum().backward()
        where = f"{arch} (simulated)"
        assert set(ran.calls) == {("gated_rmsnorm", where), ("gated_rmsnorm_backward", where)}
        found.append([t.grad for t in given])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.simulator
@pytest.mark.parametrize("arch", ["metal", pytest.param("sm90", marks=pytest.mark.proof)])
def test_of_one_element_is_left_what_eps_leaves(arch):
    """h - u mean(h u) is h (1 - u^2), h eps / (y^2 + eps); a difference of float32 is off by a million times that."""
    grad, y, z, w = (torch.rand(s, generator=torch.Generator().manual_seed(5)) + 0.5 for s in ((9, 1),) * 3 + ((1,),))
    with simulate(arch):
        dy, _, _ = ops.gated_rmsnorm_backward(grad, y, z, w, eps=1e-12)
    h = (grad * w * nn.functional.silu(z)).double()
    want = h * 1e-12 * (y.double().square() + 1e-12) ** -1.5
    torch.testing.assert_close(dy.double(), want, rtol=1e-5, atol=0)


class Block(nn.Module):
    """A linear attention's way out, small: a state that decays, its gated norm, and a projection."""

    def __init__(self, norm, heads: int = 4, n: int = 32):
        super().__init__()
        self.norm, self.heads, self.n = norm, heads, n
        self.values, self.gate = nn.Linear(n, heads * n), nn.Linear(n, heads * n)
        self.weight, self.out = nn.Parameter(torch.ones(n)), nn.Linear(heads * n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, n)
        B, T, n = x.shape
        state = self.values(x).view(B, T, self.heads, n).cumsum(1) / 8
        gate = self.gate(x).view(B, T, self.heads, n)
        return x + self.out(self.norm(state, gate, self.weight).reshape(B, T, -1))


def trained(norm, steps: int, *, compiled: bool = False) -> list[torch.Tensor]:
    """Losses of ``steps`` steps on one batch, and the parameters behind them."""
    torch.manual_seed(0)
    model = Block(norm).double()
    x, target = torch.randn(2, 6, 32, dtype=torch.float64), torch.randn(2, 6, 32, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (run(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
def test_training_goes_as_eager_goes(compiled):
    want = trained(lambda y, z, w: forward(y, z, w), 5)
    got = trained(ops.gated_rmsnorm, 5, compiled=compiled)
    assert want[0][-1] < want[0][0]
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_opcheck_of_the_differentiated_call():
    y, z, w = (t.detach().float().requires_grad_() for t in tensors(2, 3))
    torch.library.opcheck(ops.gated_rmsnorm.default, (y, z, w), dict(eps=1e-5))
