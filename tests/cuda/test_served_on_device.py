"""A step of vLLM in a CUDA graph, replayed for other batches, writes and attends as calls by themselves do.

The tensors stay where they are, as vLLM's do; between replays their contents change: lengths, tables, slots, queries,
keys and values. Pages that no request has hold NaN, and the last requests pad the batch.
"""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.core.target import target_of
from torch_attnkit.integrations.vllm import steps
from torch_attnkit.oracle.compare import check

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU with compute capability 9.0 or 10.x"),
]
PAGE, LONGEST = 16, 2048
MODELS = {
    "gpt-oss": dict(heads=64, kv_heads=8, dim=64, window=128, sink=True),
    "gpt-oss, full": dict(heads=64, kv_heads=8, dim=64, sink=True),
    "qwen3": dict(heads=32, kv_heads=8, dim=128),
}
BATCHES = ([5, 1000, 2048, 17, 64, 333], [2048, 1, 16, 700], [1, 1, 1, 1, 1, 1, 1, 1])


class Memory:
    """What vLLM keeps in place: requests have ``new`` tokens each, ``requests`` of them with those that pad."""

    def __init__(self, layer: steps.Layer, requests: int, new: int) -> None:
        self.layer, self.new = layer, new
        width, device = LONGEST // PAGE, "cuda"
        pages = requests * width + 5
        self.cache = torch.empty(pages, PAGE, layer.kv_heads, 2 * layer.dim, dtype=layer.dtype, device=device)
        self.kv_cache = self.cache.transpose(1, 2)
        self.table = torch.zeros(requests, width, dtype=torch.int32, device=device)
        self.kv_len = torch.zeros(requests, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.slots = torch.full((requests * new,), -1, dtype=torch.int64, device=device)
        sizes = [layer.heads * layer.dim, layer.kv_heads * layer.dim, layer.kv_heads * layer.dim]
        self.qkv = torch.empty(requests * new, sum(sizes), dtype=layer.dtype, device=device)
        q, k, v = self.qkv.split(sizes, -1)
        self.q = torch.empty(requests * new, layer.heads, layer.dim, dtype=layer.dtype, device=device)
        self.given = q.unflatten(-1, (layer.heads, layer.dim))
        self.key, self.value = (t.unflatten(-1, (layer.kv_heads, layer.dim)) for t in (k, v))
        self.out = torch.empty_like(self.q)
        self.sink = torch.randn(layer.heads, device=device) if layer.sink else None
        given = (self.offsets, self.table, self.kv_len)
        self.step = steps.Step.of(requests * new, *given, new, 1).to_capture(given, LONGEST)

    def fill(self, lengths: list[int], seed: int) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        n, new = len(lengths), self.new
        self.cache.fill_(torch.nan)
        order = torch.randperm(self.cache.shape[0], generator=gen, device="cuda").int()
        self.table.copy_(order[: self.table.numel()].view_as(self.table))
        self.kv_len.zero_()[:n] = torch.tensor(lengths, dtype=torch.int32)
        self.offsets.copy_(torch.arange(len(self.kv_len) + 1).clamp(max=n) * new)
        self.qkv.normal_(generator=gen)
        self.q.copy_(self.given)
        self.slots.fill_(-1)
        for b, length in enumerate(lengths):
            past = torch.arange(length - new, device="cuda")
            self.cache[self.table[b, past // PAGE].long(), past % PAGE] = torch.randn(
                len(past), self.layer.kv_heads, 2 * self.layer.dim, generator=gen, device="cuda"
            ).to(self.layer.dtype)
            own = torch.arange(length - new, length, device="cuda")
            self.slots[b * new : (b + 1) * new] = self.table[b, own // PAGE].long() * PAGE + own % PAGE
        self.qkv[n * new :] = torch.nan
        self.out.fill_(torch.nan)

    def run(self) -> None:
        steps.store(self.key, self.value, self.kv_cache, self.slots)
        steps.attend(self.layer, self.step, self.q, self.kv_cache, self.sink, self.out, decode=True)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_captured_step_is_replayed_for_other_batches(model, new):
    layer = steps.Layer(**MODELS[model], dtype=torch.bfloat16, cache_dtype=torch.bfloat16, page=PAGE)
    assert steps.refusal(steps.MIXED, layer, target_of(torch.device("cuda"))) is None
    held = Memory(layer, 8, new)
    held.fill([new] * 8, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are loaded, and workspaces made, before the capture
        held.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run()
    for seed, lengths in enumerate(BATCHES, 1):
        lengths = [max(n, new) for n in lengths]
        held.fill(lengths, seed)
        graph.replay()
        got, cache, n = held.out.clone(), held.cache.clone(), len(lengths) * new
        held.out.fill_(torch.nan)
        held.run()
        assert torch.equal(got.view(torch.int16)[:n], held.out.view(torch.int16)[:n])
        assert torch.equal(cache.view(torch.int16), held.cache.view(torch.int16))
        written = held.slots[held.slots >= 0]
        assert torch.equal(cache.flatten(0, 1)[written], torch.cat([held.key, held.value], -1)[:n])
        assert got[:n].isfinite().all() and not got[n:].any()
        for b, length in enumerate(lengths):  # each request alone, without pages
            keys = torch.arange(length, device="cuda")
            kv = cache[held.table[b, keys // PAGE].long(), keys % PAGE]
            k, v = (t.unsqueeze(0) for t in kv.split(layer.dim, -1))
            rows = slice(b * new, (b + 1) * new)
            given = [t.cpu() for t in (held.q[rows].unsqueeze(0), k, v)]
            sink = None if held.sink is None else held.sink.cpu()
            want, exact = (
                torch.ops.attnkit.flash_attention(*(t.to(dtype) for t in given), sink, causal=True, **layer.options)[0]
                for dtype in (torch.bfloat16, torch.float64)
            )
            check("out", got[rows].cpu(), want[0], exact[0])
