"""quack's kernels from PyPI, unmodified, on a simulated GPU, checked, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.oracle.compare import check
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
for package in ("cutlass", "quack"):
    pytest.importorskip(package, reason=f"needs {package}")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["sm90", "sm100"], autouse=True)
def gpu(request, tmp_path, monkeypatch):
    """A simulated GPU; quack keeps what it compiles in a folder of the test's own."""
    import quack.cache

    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    with ptx.device(request.param), ptx.counting() as launches:
        yield
    assert launches, "nothing was launched"


CHECKED = dict(check=True, seed=1)


def in_both(function, *tensors):
    """A function of tensors in float32 and in float64."""
    return [
        function(*(t.to(dtype) if t.is_floating_point() else t for t in tensors))
        for dtype in (torch.float32, torch.float64)
    ]


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(8, 1024, torch.bfloat16), (4, 768, torch.float32), (2, 16384, torch.float16)]
)
def test_rmsnorm(rows, width, dtype):
    from quack.rmsnorm import rmsnorm_fwd

    x, w = torch.randn(rows, width).to(dtype), torch.randn(width)
    with ptx.settings(**CHECKED):
        out, _, rstd = rmsnorm_fwd(x, w, store_rstd=True)
    scale = lambda x: (x.square().mean(-1) + 1e-6).rsqrt()
    want, want64 = in_both(lambda x, w: x * scale(x).unsqueeze(-1) * w, x, w)
    check("rmsnorm", out, want.to(dtype), want64)
    check("rstd", rstd, *in_both(scale, x))


@pytest.mark.parametrize(("rows", "width", "dtype"), [(16, 4096, torch.float32), (8, 320, torch.bfloat16)])
def test_softmax(rows, width, dtype):
    from quack.softmax import softmax_bwd, softmax_fwd

    x, dy = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    with ptx.settings(**CHECKED):
        y = softmax_fwd(x)
        dx = softmax_bwd(dy, y)
    want, want64 = in_both(lambda x: x.softmax(-1), x)
    check("softmax", y, want.to(dtype), want64)
    backward = lambda dy, y: y * (dy - (dy * y).sum(-1, keepdim=True))
    want, want64 = in_both(backward, dy, y)
    check("softmax backward", dx, want.to(dtype), want64)


@pytest.mark.parametrize(("width", "k", "dtype"), [(1024, 8, torch.bfloat16), (256, 32, torch.float32)])
def test_topk(width, k, dtype):
    """Distinct numbers: quack finds the index in the low bits of the value, and breaks ties its own way."""
    from quack.topk import topk_fwd

    x = torch.stack([torch.randperm(width) for _ in range(8)]).sub(width // 2).to(dtype)
    with ptx.settings(**CHECKED):
        values, indices = topk_fwd(x, k)
    want = x.topk(k, -1)
    assert torch.equal(values.float().sort(-1).values, want.values.float().sort(-1).values)
    assert torch.equal(x.gather(-1, indices.long()), values)


@pytest.mark.parametrize(("width", "dtype"), [(1024, torch.bfloat16), (32000, torch.float32)])
def test_cross_entropy(width, dtype):
    from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

    x, target = torch.randn(4, width).to(dtype), torch.tensor([0, 7, -100, width - 1])
    dloss = torch.randn(4)
    with ptx.settings(**CHECKED):
        loss, lse = cross_entropy_fwd(x, target, return_lse=True)
        dx = cross_entropy_bwd(x, target, dloss, lse)
    entropy = lambda x: torch.nn.functional.cross_entropy(x, target, reduction="none")
    check("loss", loss, *in_both(entropy, x))
    check("lse", lse, *in_both(lambda x: x.logsumexp(-1), x))
    want = []
    for d in (torch.float32, torch.float64):
        leaf = x.to(d, copy=True).requires_grad_()
        entropy(leaf).backward(dloss.to(d))
        want.append(leaf.grad)
    check("dx", dx, want[0].to(dtype), want[1])


def test_rows_past_the_end():
    """The rows that fill up a block are read from shared memory into which nobody has put anything, and dropped.

    The result is right, with NaN in that memory too; a checked run tells of the reads.
    """
    from quack.rmsnorm import rmsnorm_fwd

    x, w = torch.randn(3, 768), torch.randn(768)
    want, want64 = in_both(lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w, x, w)
    check("three rows", rmsnorm_fwd(x, w)[0], want, want64)
    with ptx.settings(check=True), pytest.raises(ptx.CheckError, match="read of uninitialised memory"):
        rmsnorm_fwd(x, w)
