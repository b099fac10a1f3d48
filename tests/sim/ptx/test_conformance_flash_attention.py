"""FlashAttention-4 from PyPI, unmodified, on a simulated GPU, checked, against attention in float64."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.oracle.compare import check
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
for package in ("cutlass", "flash_attn", "quack"):
    pytest.importorskip(package, reason=f"needs {package}")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]
ARCHS = ("sm100", "sm90")
CHECKED = dict(check=True, seed=1)


def attend(q, k, v, *, causal=False, window=(None, None), sink=None, lengths=None):
    """out (B, T, Hq, Dv) and lse (B, Hq, T) of q (B, T, Hq, D), k and v (B, S, Hkv, ...), in the dtype of q.

    ``window`` is FlashAttention's (left, right), positions are aligned at the bottom right, ``sink`` (Hq) joins the
    denominator alone, ``lengths`` (B) are the keys that there are.
    """
    T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5  # (B, Hq, T, S)
    ends = (torch.full((q.shape[0],), S) if lengths is None else lengths).view(-1, 1, 1)
    keys, rows = torch.arange(S), torch.arange(T).view(-1, 1) + ends - T  # (S), (B, T, 1): the rows' positions
    seen = (keys < ends).expand(-1, T, -1)
    left, right = window
    if causal or right is not None:
        seen = seen & (keys <= rows + (0 if causal else right))
    if left is not None:
        seen = seen & (keys >= rows - left)
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.to(q.dtype).view(1, -1, 1))
    return torch.einsum("bhts,bshd->bthd", (scores - total.unsqueeze(-1)).exp(), v), lse


def qkv(T, *, S=0, B=1, Hq=2, Hkv=0, D=128, Dv=0, dtype=torch.bfloat16):
    sizes = ((T, Hq, D), (S or T, Hkv or Hq, D), (S or T, Hkv or Hq, Dv or D))
    return [torch.randn(B, *size).to(dtype) for size in sizes]


def compare(name, got, inputs, *, slack=0.0, **how):
    """Results against the same attention in float64 and, for the tolerance, in float32 rounded at the end.

    ``slack`` is what an LSE may be off besides.
    """
    r32, r64 = (attend(*(t.to(dtype) for t in inputs), **how) for dtype in (torch.float32, torch.float64))
    check(f"{name} out", got[0], r32[0].to(got[0].dtype), r64[0])
    if len(got) > 1 and not slack:
        check(f"{name} lse", got[1], r32[1], r64[1])
    elif slack:
        allowed = slack + 4 * torch.finfo(torch.float32).eps * r64[1].abs().max().item()
        torch.testing.assert_close(got[1].double(), r64[1], rtol=0, atol=allowed, msg=lambda m: f"{name} lse: {m}")


def exp2_error():
    """The largest relative error of the cubic that FlashAttention-4 takes for exp2 of some scores on Blackwell.

    A sum of such terms is off by no more, and its logarithm by as much in absolute terms.
    """
    from flash_attn.cute.utils import POLY_EX2

    x = torch.linspace(0, 1, 1 << 16, dtype=torch.float64)
    cubic = sum(c * x**n for n, c in enumerate(POLY_EX2[3]))
    return (cubic / torch.exp2(x) - 1).abs().max().item()


DENSE = {
    "d64": (dict(T=256, D=64), {}),
    "d96-causal": (dict(T=256, D=96), dict(causal=True)),
    "d128-causal": (dict(T=256), dict(causal=True)),
    "d128-odd": (dict(T=200, S=333), {}),
    "d192-128-causal": (dict(T=256, D=192, Dv=128), dict(causal=True)),
    "d256-causal": (dict(T=256, D=256), dict(causal=True)),
    "gqa-decode": (dict(T=1, S=512, Hq=8, Hkv=2), dict(causal=True)),
    "gqa-f16": (dict(T=160, Hq=4, Hkv=2, dtype=torch.float16), dict(causal=True)),
    "window": (dict(T=384), dict(window=(100, 0))),
    "window-both": (dict(T=256, D=64), dict(window=(64, 31))),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("arch", ARCHS)
def test_forward(arch, name):
    sizes, how = DENSE[name]
    inputs = qkv(**sizes)
    with ptx.device(arch, **CHECKED):
        from flash_attn.cute import flash_attn_func

        got = flash_attn_func(
            *inputs, causal=how.get("causal", False), window_size=how.get("window", (None, None)), return_lse=True
        )
    compare(f"{arch} {name}", got, inputs, slack=exp2_error() if arch == "sm100" else 0.0, **how)


@pytest.mark.proof
@pytest.mark.parametrize("arch", ARCHS)
def test_learned_sink(arch):
    inputs, sink = qkv(256), torch.randn(2).bfloat16()
    with ptx.device(arch, **CHECKED):
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(*inputs, causal=True, learnable_sink=sink)[0]
    compare(f"{arch} sink", (out,), inputs, causal=True, sink=sink)


@pytest.mark.proof
def test_split_kv():
    """Three parts of the keys and the kernel that combines them; Blackwell alone has it."""
    inputs = qkv(64, S=1024)
    with ptx.device("sm100", **CHECKED), ptx.counting() as launches:
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(*inputs, num_splits=3)[0]
    assert len(launches) == 2
    compare("split", (out,), inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.proof
def test_variable_lengths(arch):
    starts = [0, 100, 101, 256]
    inputs = [t[0] for t in qkv(256)]
    cu = torch.tensor(starts, dtype=torch.int32)
    with ptx.device(arch, **CHECKED):
        from flash_attn.cute import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            *inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=155, max_seqlen_k=155, causal=True
        )[0]
    for a, b in zip(starts, starts[1:], strict=False):
        compare(f"{arch} rows {a} to {b}", (out[None, a:b],), [t[None, a:b] for t in inputs], causal=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_paged_cache(arch):
    """Pages in any order; those of no sequence hold NaN."""
    q = torch.randn(2, 1, 8, 128).bfloat16()
    table, lengths = torch.tensor([[1, 5, 2, 0], [3, 4, 0, 0]], dtype=torch.int32), torch.tensor([300, 200])
    k, v = (torch.full((8, 128, 2, 128), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    for pages in (k, v):
        pages[[0, 1, 2, 3, 4, 5]] = torch.randn(6, 128, 2, 128).bfloat16()
    with ptx.device(arch, **CHECKED):
        from flash_attn.cute import flash_attn_varlen_func

        out = flash_attn_varlen_func(q, k, v, page_table=table, seqused_k=lengths.int(), causal=True)[0]
    flat = [t[table].reshape(2, 512, 2, 128) for t in (k, v)]
    compare(f"{arch} paged", (out,), [q, *flat], causal=True, lengths=lengths)


@pytest.mark.proof
@pytest.mark.parametrize(("sizes", "causal"), [(dict(T=256), True), (dict(T=256, D=64, Hq=4, Hkv=2), False)])
@pytest.mark.parametrize("arch", ARCHS)
def test_backward(arch, sizes, causal):
    """The gradients of all three inputs, by three or four kernels; on Blackwell the main one works in pairs of CTAs."""
    inputs = [t.requires_grad_() for t in qkv(**sizes)]
    with ptx.device(arch, **CHECKED):
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(*inputs, causal=causal)[0]
        gradient = torch.randn_like(out)
        out.backward(gradient)
    found = []
    for dtype in (torch.float32, torch.float64):
        copies = [t.detach().to(dtype).requires_grad_() for t in inputs]
        attend(*copies, causal=causal)[0].backward(gradient.to(dtype))
        found.append([t.grad for t in copies])
    for what, t, a, b in zip("qkv", inputs, *found, strict=True):
        check(f"{arch} d{what}", t.grad, a.to(t.dtype), b)
