"""``batch_invariant`` on a GPU at the sizes of models: the same bits alone and among 64, eager and in a graph.

``python tests/cuda/test_invariance_on_device.py`` prints what the option costs: microseconds a call with it, without
it, and their ratio, by CUDA graphs whose inputs are cold.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bench import timing
from tests.invariance.subjects import (
    BF16,
    E4M3,
    Caches,
    Results,
    Subject,
    blocks,
    decode,
    experts,
    latents,
    made,
    ops,
    packed,
    rows,
)
from torch_attnkit import batch_invariant

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own imports warn
    pytest.mark.hardware,
    pytest.mark.seconds(900),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs an NVIDIA GPU with compute capability 9.0",
    ),
]
_RANDOM = torch.Generator().manual_seed(0)
LONG = (8192, 513, 512, 511, 8191, 64, 1, *torch.randint(1, 8193, (57,), generator=_RANDOM).tolist())  # 64 sequences
SHORT = tuple(-(-n // 8) for n in LONG)
NEW = (512, 1, 1, 130, 2048, 1, 1, 64)  # tokens of prompts, chunks and steps
BATCHES = (
    ([0], 0),
    ([4], 1),
    ([4, 0, 9], 2),
    ([1, 2, 0], 3),
    ([*range(1, 17), 0], 4),
    ([*range(20, 60), 4, *range(5, 20), 0], 5),
    ([*range(63, -1, -1)], 6),
)
GPTOSS = dict(swiglu="gptoss", limit=7.0, interleaved=True)


@functools.cache
def subject(name: str) -> Subject:
    llama, gptoss = Caches(8, 128, LONG), Caches(8, 64, LONG)
    return {
        "sdpa_decode": lambda: decode(32, llama),
        "sdpa_decode_paged": lambda: decode(32, llama, page=16),
        "sdpa_decode_paged, GPT-OSS": lambda: decode(64, gptoss, page=16, sink=True),
        "sdpa_decode_paged, GPT-OSS' window": lambda: decode(64, gptoss, page=16, sink=True, window=128, varies=""),
        "sdpa_decode_paged over E4M3": lambda: decode(32, Caches(8, 128, LONG, E4M3), page=16),
        "sdpa_decode_paged, 16 heads a KV head": lambda: decode(64, Caches(4, 128, LONG), page=16),
        "sdpa_decode_paged, latents": lambda: latents(128, LONG),
        "flash_attention_paged, single tokens": lambda: blocks(32, llama, tokens=(1,)),
        "flash_attention_paged": lambda: blocks(32, llama, tokens=NEW),
        "flash_attention_paged, GPT-OSS": lambda: blocks(64, gptoss, tokens=NEW),
        "flash_attention_paged, GPT-OSS' window": lambda: blocks(64, gptoss, tokens=NEW, window=128, varies=""),
        "flash_attention_paged, a wide window": lambda: blocks(32, llama, tokens=NEW, window=4096, softcap=50.0),
        "flash_attention_paged over E4M3": lambda: blocks(32, Caches(8, 128, LONG, E4M3), tokens=NEW, queries=BF16),
        "flash_attention_paged of E4M3": lambda: blocks(32, Caches(8, 128, LONG, E4M3), tokens=NEW),
        "flash_attention_varlen": lambda: packed(32, Caches(8, 128, SHORT), "", causal=True),
        "fp4_moe, GPT-OSS": lambda: experts("mxfp4", 2880, 2880, count=32, topk=4, **GPTOSS),
        "fp4_moe, NVFP4": lambda: experts("nvfp4", 2048, 768, count=64, topk=8),
        "gated_rmsnorm": lambda: rows(ops.gated_rmsnorm, 16384, made(0, "w", 16384), inputs=2),
        "route_softmax": lambda: rows(ops.route_softmax, 128, topk=4),
    }[name]()


ATTENTION = (
    "sdpa_decode", "sdpa_decode_paged", "sdpa_decode_paged, GPT-OSS", "sdpa_decode_paged, GPT-OSS' window",
    "sdpa_decode_paged over E4M3", "sdpa_decode_paged, 16 heads a KV head", "sdpa_decode_paged, latents",
    "flash_attention_paged, single tokens", "flash_attention_paged", "flash_attention_paged, GPT-OSS",
    "flash_attention_paged, GPT-OSS' window", "flash_attention_paged, a wide window",
    "flash_attention_paged over E4M3", "flash_attention_paged of E4M3", "flash_attention_varlen",
)  # fmt: skip
TOKENWISE = ("fp4_moe, GPT-OSS", "fp4_moe, NVFP4", "gated_rmsnorm", "route_softmax")


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield
    subject.cache_clear()
    torch.cuda.empty_cache()


def differing(results: list[tuple[list[int], Results]]) -> dict[int, int]:
    """The sequences that have other bits in one batch than in another, and how many bytes at most."""
    known: dict[int, tuple[torch.Tensor, ...]] = {}
    found: dict[int, int] = {}
    for chosen, parts in results:
        for n, part in zip(chosen, parts, strict=True):
            first = known.setdefault(n, tuple(t.clone() for t in part))
            pairs = zip(part, first, strict=True)
            other = sum(int((a.contiguous().view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
            if other:
                found[n] = max(other, found.get(n, 0))
    return found


@pytest.mark.parametrize("name", [*ATTENTION, *TOKENWISE])
def test_a_sequence_has_the_same_bits_in_any_batch(name):
    one = subject(name)
    with batch_invariant():
        ran = [(chosen, one.call(chosen, seed)) for chosen, seed in BATCHES]
    assert not any(bool(t.isnan().any()) for _, parts in ran for part in parts for t in part if t.is_floating_point())
    assert differing(ran) == {}
    if "sm90" in one.varies:
        assert differing([(chosen, one.call(chosen, seed)) for chosen, seed in BATCHES]), "the batches do not tell"


@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 500, 2000])
@pytest.mark.parametrize("name", TOKENWISE)
def test_a_token_has_the_same_bits_among_any_number(name, tokens):
    one = subject(name)
    with batch_invariant():
        ran = [([7], one.call([7], 0)), ([*range(8, 8 + tokens), 7], one.call([*range(8, 8 + tokens), 7], 0))]
    assert differing(ran) == {}


@pytest.mark.parametrize("name", ["sdpa_decode_paged", "flash_attention_paged, single tokens", "fp4_moe, GPT-OSS"])
def test_a_graph_gives_the_bits_of_an_eager_call(name):
    """Captured with 64 sequences, replayed with others in their places, each beside what it is alone."""
    one, first, second = subject(name), list(range(64)), [*range(1, 64), 0]
    with batch_invariant():
        op, args, options = one.given(first, 1)
        options.pop("max_seqlen_q", None)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                op(*args, **options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            held = op(*args, **options)
        for old, new in zip(args, one.given(second, 1)[1], strict=True):
            assert old.shape == new.shape
            old.copy_(new)
        for t in held if isinstance(held, tuple) else (held,):
            t.fill_(torch.nan)
        graph.replay()
        ran = [(second, one.parts(second, held)), *(([n], one.call([n], n)) for n in (0, 1, 4, 40))]
    assert differing(ran) == {}


CHUNKED = {
    "Llama": (8, 128, 4, torch.bfloat16, {}),
    "GPT-OSS": (8, 64, 8, torch.bfloat16, {}),
    "GPT-OSS' window": (8, 64, 8, torch.bfloat16, dict(window=128)),
    "a wide window and soft caps": (8, 128, 4, torch.bfloat16, dict(window=2000, softcap=30.0)),
    "E4M3": (8, 128, 4, E4M3, {}),
    "D 256": (4, 256, 4, torch.bfloat16, {}),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_a_token_has_the_same_bits_however_a_prompt_is_cut(name):
    kv_heads, dim, group, dtype, options = CHUNKED[name]
    total, page = 4096, 16
    shape = total // page, page, kv_heads, dim
    k, v = (made(1, n, *shape, dtype=dtype) for n in "kv")
    q, table = made(1, "q", total, group * kv_heads, dim, dtype=dtype), torch.arange(total // page).int()[None]

    def run(cut: list[int]) -> Results:
        found, at = [], total - sum(cut)
        for count in cut:
            ends = torch.tensor([0, count]).int(), table, torch.tensor([at + count]).int()
            longest = 1 << (count - 1).bit_length()
            part = ops.flash_attention_paged(q[at : at + count], k, v, *ends, max_seqlen_q=longest, **options)
            found.append(part)
            at += count
        return [tuple(torch.cat(t)[-1024:] for t in zip(*found, strict=True))]

    cuts = ([4096], [2048, 2048], [1500, 1, 1571, 1024], [1024], [1] * 40 + [984], [300, 724])
    with batch_invariant():
        assert differing([([0], run(cut)) for cut in cuts]) == {}
    if "window" not in name:
        assert differing([([0], run(cut)) for cut in cuts]), "the cuts do not tell"


# What it costs.


def _timed(what: str, op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    runs = []
    for on in (True, False):
        with batch_invariant(on):
            sets = timing.cold(args, op(*args, **options))
            runs.append(timing.graph([functools.partial(op, *one, **options) for one in sets]))
    with_it, without = timing.interleaved(runs)
    print(f"{what:64s} {with_it:10.1f} {without:10.1f} {with_it / without:6.2f}", flush=True)
    del runs, sets
    torch.cuda.empty_cache()


def _times() -> None:
    print(torch.cuda.get_device_name(), "us a call with the option, without, ratio")
    for heads, caches in ((32, (8, 128)), (64, (8, 64))):
        for keys in (1024, 8192):
            for count in (1, 4, 16, 64):
                pool, chosen = Caches(*caches, (keys,)), list(range(count))
                what = f"{heads}/{caches[0]} heads, D {caches[1]}, {count} x {keys}, pages of 16"
                _timed(f"sdpa_decode_paged {what}", *decode(heads, pool, page=16).given(chosen, 1))
                _timed(f"flash_attention_paged {what}", *blocks(heads, pool, tokens=(1,)).given(chosen, 1))
                # What a step of single tokens costs in vLLM: with the option the one op, without it the other.
    for count, tokens, keys in ((1, 512, 512), (1, 4096, 4096), (4, 4096, 4096), (16, 512, 8192)):
        pool = Caches(8, 128, (keys,))
        made_ = blocks(32, pool, tokens=(tokens,)).given(list(range(count)), 1)
        _timed(f"flash_attention_paged {count} x {tokens} tokens, {keys} keys", *made_)
        window = blocks(64, Caches(8, 64, (keys,)), tokens=(tokens,), window=128).given(list(range(count)), 1)
        _timed(f"flash_attention_paged, window 128, {count} x {tokens}, {keys} keys", *window)
    gptoss = experts("mxfp4", 2880, 2880, count=32, topk=4, **GPTOSS)
    for tokens in (1, 4, 16, 64, 256, 1024, 4096, 8192):
        op, args, options = gptoss.given(list(range(tokens)), 0)
        _timed(f"fp4_moe GPT-OSS-20B, {tokens} tokens", op, args, options)


if __name__ == "__main__":
    with torch.device("cuda"):
        _times()
