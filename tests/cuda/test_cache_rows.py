"""Cache rows and rotated heads on a GPU in the ways they are used: graphs, and tensors that 32 bits cannot count."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.formats import kv_cache, nvfp4, rope

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with compute capability 9.0 or 10.x"),
]
A = torch.ops.attnkit


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def test_a_graph_replays_with_new_numbers_and_slots():
    kv, cache, slot = normal(9, 512), torch.zeros(40, 584, dtype=torch.uint8, device="cuda"), torch.arange(9).cuda()
    step = lambda: (
        A.kv_cache_write(kv, cache, slot, format="fp8"),
        A.kv_cache_gather(cache, slot, format="fp8", head_dim=512, dtype=torch.bfloat16),
    )
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, out = step()
    kv.copy_(normal(9, 512))
    slot.copy_(torch.tensor([30, 3, -1, 8, 39, 0, 1, 40, 7]))  # 40 is no row
    graph.replay()
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 8])
    rows = kv_cache.encode_rows(kv[kept].cpu(), "fp8", 64)
    assert torch.equal(cache[slot[kept]].cpu(), rows)
    assert torch.equal(out[kept].cpu(), kv_cache.decode_rows(rows, "fp8", 512, 64))
    assert not bool(out[[2, 7]].any())


@pytest.mark.parametrize(("format", "size"), [("none", 512), ("fp8", 584)])
def test_a_cache_of_more_than_2_to_the_32_bytes(format, size):
    plain = format == "none"
    count = (1 << 32) // size + 5
    cache = torch.zeros(count, size, dtype=torch.bfloat16 if plain else torch.uint8, device="cuda")
    slot = torch.tensor([count - 1, 0, count // 2, -1], device="cuda")
    kv = normal(4, 512)
    A.kv_cache_write(kv, cache, slot, format=format)
    want = kv[:3] if plain else kv_cache.encode_rows(kv[:3].cpu(), format, 64)
    assert torch.equal(cache[slot[:3]].cpu(), want.cpu())
    assert int(cache.any(1).sum()) == 3
    out = A.kv_cache_gather(cache, slot, format=format, head_dim=512, dtype=torch.bfloat16)
    back = kv[:3].cpu() if plain else kv_cache.decode_rows(want, format, 512, 64)
    assert torch.equal(out[:3].cpu(), back) and not bool(out[3].any())


@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_heads_of_more_than_2_to_the_31_numbers(layout):
    tokens, heads, dim = (1 << 31) // (64 * 512) + 3, 64, 512
    o = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device="cuda").uniform_(-2, 2)
    angle = 6 * torch.rand(tokens, 32, device="cuda")
    codes, scale = A.inverse_rope_fp4(o, angle.cos(), angle.sin(), scale_layout=layout)
    for part in (slice(0, 2), slice(tokens - 2, tokens)):
        c, s = (t[part, None].cpu() for t in (angle.cos(), angle.sin()))
        rotated = rope.apply(o[part].cpu(), c, s, interleaved=True, inverse=True)
        want = nvfp4.quantize(rotated)
        assert torch.equal(codes[part].cpu(), want[0])
        if layout == "linear":
            assert torch.equal(scale[part].cpu(), want[1])


def normed_and_rotated(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    exact = torch.nn.functional.rms_norm(q.double(), q.shape[-1:], eps=1e-6)
    return rope.apply(exact, cos[:, None].double(), sin[:, None].double(), interleaved=True)


@pytest.mark.parametrize("format", ["none", "fp8"])
def test_heads_and_keys_are_read_behind_the_kernels_that_made_them(format):
    """The launch begins early and waits: in a chain of calls, captured, each reads what the one before it wrote."""
    q, kv, angle = normal(33, 64, 512), normal(33, 512), 6 * torch.rand(33, 32, device="cuda")
    cache = torch.zeros(40, 512, dtype=torch.bfloat16, device="cuda")
    cache = cache if format == "none" else torch.zeros(40, 584, dtype=torch.uint8, device="cuda")
    cos, sin, slot = angle.cos(), angle.sin(), torch.randperm(40, device="cuda")[:33]
    run = lambda q, kv: A.rope_kv_cache_write(q, kv, cache, slot, cos, sin, format=format)
    step = lambda: run(run(run(q * 2, kv), kv), kv * 2)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    q.copy_(normal(33, 64, 512))
    kv.copy_(normal(33, 512))
    for _ in range(20):
        cache.zero_()
        graph.replay()
    rows = rope.apply(2 * kv.cpu(), cos.cpu(), sin.cpu(), interleaved=True)
    want = rows if format == "none" else kv_cache.encode_rows(rows, format, 64)
    assert torch.equal(cache[slot].cpu(), want)
    rounded, twice = (lambda x: normed_and_rotated(x, cos, sin).bfloat16()), normed_and_rotated
    assert float((out.double() - twice(rounded(rounded(q * 2)), cos, sin)).abs().max()) < 0.1


@pytest.mark.parametrize("format", ["none", "fp8"])
def test_heads_of_more_than_2_to_the_31_numbers_are_normed(format):
    tokens, heads = (1 << 31) // (64 * 512) + 3, 64
    q = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda").uniform_(-2, 2)
    kv, angle = normal(tokens, 512), 6 * torch.rand(tokens, 32, device="cuda")
    cache = torch.zeros_like(kv) if format == "none" else torch.zeros(tokens, 584, dtype=torch.uint8, device="cuda")
    slot = torch.arange(tokens, device="cuda").flip(0)
    out = A.rope_kv_cache_write(q, kv, cache, slot, angle.cos(), angle.sin(), format=format)
    for part in (slice(0, 2), slice(tokens - 2, tokens)):
        cos, sin = angle[part].cos(), angle[part].sin()
        exact = normed_and_rotated(q[part], cos, sin)
        assert float((out[part].double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
        rows = rope.apply(kv[part].cpu(), cos.cpu(), sin.cpu(), interleaved=True)
        want = rows if format == "none" else kv_cache.encode_rows(rows, format, 64)
        assert torch.equal(cache[slot[part]].cpu(), want)
