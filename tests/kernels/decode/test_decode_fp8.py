"""Decode over E4M3 on a simulated H200: queries of any magnitude, and what reaches whom."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.decode.plan import FP8_KV_HEADS
from torch_attnkit.oracle.compare import check

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

E4M3 = torch.float8_e4m3fn
decode = torch.ops.attnkit.sdpa_decode


def _inputs(dim: int = 64, dim_v: int = 64, keys: int = 150, heads: int = 10):
    """bfloat16 queries, and keys and values of every code but NaN, of the signs and magnitudes that come."""
    gen = torch.Generator().manual_seed(dim)
    q = torch.randn(2, heads, dim, generator=gen).bfloat16()
    k, v = (torch.randn(2, 2, keys, d, generator=gen).to(E4M3) for d in (dim, dim_v))
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8).view(E4M3)
    v.view(torch.uint8).view(-1)[: len(codes)] = codes.view(torch.uint8)
    return q, k, v, torch.tensor([keys, 1], dtype=torch.int32)


def _simulated(*args, arch: str = "sm90", **options) -> tuple[torch.Tensor, torch.Tensor]:
    with torch_attnkit.simulate(arch):
        return decode(*args, **options)


def _agrees(got: tuple[torch.Tensor, ...], args: tuple, options: dict) -> None:
    ref, ref64 = decode(*args, **options), decode(*(a.double() for a in args[:3]), *args[3:], **options)
    for name, g, r, r64 in zip(("out", "lse"), got, ref, ref64, strict=True):
        check(name, g, r, r64)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("power", [-126, -40, 0, 40, 120])
def test_bfloat16_queries_of_any_magnitude(power, arch):
    """Products are of float16, to which a head's row is scaled by a power of two: the bits do not depend on it."""
    q, *rest = _inputs()
    args = ((q.double() * 2.0**power).bfloat16(), *rest)
    got = _simulated(*args, scale=2.0**-power / 8, arch=arch)
    _agrees(got, args, dict(scale=2.0**-power / 8))
    if power in (-40, 40):
        assert all(torch.equal(g, w) for g, w in zip(got, _simulated(q, *rest, scale=1 / 8, arch=arch), strict=True))


def test_a_head_of_other_magnitude_than_its_neighbours():
    q, *rest = _inputs()
    by = 2.0 ** torch.tensor([0, -100, 60, 0, -20, 3, 90, -126, 0, 1.0])
    args = ((q.double() * by[:, None]).bfloat16(), *rest)
    _agrees(_simulated(*args), args, {})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_head(bad):
    q, k, v, length = _inputs()
    want = _simulated(q, k, v, length)
    q[0, 3, 17] = bad
    got = _simulated(q, k, v, length)
    _agrees(got, (q, k, v, length), {})
    kept = torch.ones(2, q.shape[1], dtype=torch.bool)
    kept[0, 3] = False
    assert not got[0][~kept].isfinite().any()
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g[kept], w[kept])


def test_e4m3_queries_are_the_same_numbers():
    """As float16 queries of these numbers, but for the dtype of the result."""
    q, k, v, length = _inputs()
    out, lse = _simulated(q.to(E4M3), k, v, length)
    want, want_lse = _simulated(q.to(E4M3).half(), k, v, length)
    assert out.dtype == torch.bfloat16 and torch.equal(lse, want_lse)
    torch.testing.assert_close(out.float(), want.float(), rtol=2**-8, atol=0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dims", FP8_KV_HEADS, ids=str)
def test_pages_of_one_key_or_of_many(dims):
    """The same keys wherever they lie: the same bits."""
    q, k, v, length = _inputs(*dims, keys=96)
    order = torch.randperm(192, generator=torch.Generator().manual_seed(0))
    want = None
    for page in (96, 48, 16, 1):
        table = order[: 192 // page].argsort().to(torch.int32).view(2, -1)
        pages = []
        for cache in (k, v):
            rows = cache.transpose(1, 2).reshape(-1, page, 2, cache.shape[-1])  # (Np, Ps, Hkv, D)
            pages.append(rows.view(torch.uint8)[table.flatten().argsort()].view(E4M3))
        with torch_attnkit.simulate("sm90"):
            got = torch.ops.attnkit.sdpa_decode_paged(q, *pages, table, length)
        _agrees(got, (q, k, v, length), {})
        want = want or got
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
