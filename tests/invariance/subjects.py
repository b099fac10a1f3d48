"""Calls of ops whose parts are sequences, or tokens, that a test may put together as it likes: ``subjects()``.

A pool of sequences lies ready. ``call(chosen, seed)`` puts those with the chosen numbers into one call, in that order,
and gives each one's results; ``seed`` decides on where pages lie. The same number is the same sequence, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ops = torch.ops.attnkit
E4M3 = torch.float8_e4m3fn
Results = list[tuple[torch.Tensor, ...]]
# Keys of the pool's sequences: at the edges of tiles and of what one CTA attends alone (512), and far beyond.
LENGTHS = (1, 1600, 63, 64, 65, 511, 512, 513, 700, 127, 129, 1025, 16, 300, 900, 33, 257, 1, 2, 640)
# New tokens of each, for ops that take blocks of queries.
TOKENS = (1, 1, 5, 1, 65, 2, 1, 130, 1, 17, 1, 3, 16, 40, 1, 33, 1, 1, 2, 200)


@dataclass(frozen=True)
class Subject:
    """``varies``: the targets on which a test sees bits depend on the batch without the option."""

    call: Callable[[list[int], int], Results]
    varies: str = ""


def made(number: int, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What sequence ``number`` has by a name: the same numbers whatever it is put beside."""
    seed = 1000 * number + sum(map(ord, name))
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def _lengths(chosen: list[int], of: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.tensor([of[n % len(of)] for n in chosen], dtype=torch.int32)


def _paged(chosen: list[int], seed: int, kv_heads: int, dim: int, dtype: torch.dtype, page: int) -> list[torch.Tensor]:
    """k, v (Np, Ps, Hkv, D) and the table: pages in an order that follows from ``seed``, NaN where no key is."""
    lengths = _lengths(chosen).tolist()
    gen = torch.Generator().manual_seed(seed)
    used = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(used) + 1 + seed % 7, generator=gen).int()
    both = torch.full((2, len(order), page, kv_heads, dim), torch.nan).to(dtype)
    table = torch.full((len(chosen), max(used) + seed % 3), 1 << 30, dtype=torch.int32)
    for b, (n, length) in enumerate(zip(chosen, lengths, strict=True)):
        table[b, : used[b]] = order[sum(used[:b]) :][: used[b]]
        for cache, name in zip(both, "kv", strict=True):
            rows = torch.full((used[b] * page, kv_heads, dim), torch.nan).to(dtype)
            rows[:length] = made(n, name, length, kv_heads, dim, dtype=dtype)
            cache[table[b, : used[b]].long()] = rows.view(used[b], page, kv_heads, dim)
    return [both[0], both[1], table]


def decode(
    heads: int = 8, kv_heads: int = 2, dim: int = 64, *, page: int = 0, dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype | None = None, varies: str = "sm90 sm100 metal", **options: Any,
) -> Subject:  # fmt: skip
    """One query a sequence; without pages caches are as long as the longest sequence needs, and 40 more."""
    cache = cache or dtype

    def call(chosen: list[int], seed: int) -> Results:
        q = torch.stack([made(n, "q", heads, dim, dtype=dtype) for n in chosen])
        kv_len, more = _lengths(chosen), {}
        if options.get("sink"):
            more["sink"] = made(0, "sink", heads, dtype=torch.float32)
        if page:
            found = ops.sdpa_decode_paged(q, *_paged(chosen, seed, kv_heads, dim, cache, page), kv_len, **rest | more)
        else:
            k, v = (_dense(chosen, name, kv_heads, dim, cache).transpose(1, 2) for name in "kv")
            found = ops.sdpa_decode(q, k, v, kv_len, **rest | more)
        return list(zip(*found, strict=True))

    rest = {name: value for name, value in options.items() if name != "sink"}
    return Subject(call, varies)


def _dense(chosen: list[int], name: str, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    lengths = _lengths(chosen).tolist()
    rows = torch.zeros(len(chosen), max(lengths) + 40, kv_heads, dim).to(dtype)
    for b, (n, length) in enumerate(zip(chosen, lengths, strict=True)):
        rows[b, :length] = made(n, name, length, kv_heads, dim, dtype=dtype)
    return rows


def multi(tokens: int, heads: int = 8, kv_heads: int = 2, dim: int = 64, **options: Any) -> Subject:
    """``tokens`` queries a sequence, at the end of its cache."""
    varies = "sm90 sm100 metal"

    def call(chosen: list[int], seed: int) -> Results:
        q = torch.stack([made(n, "q", tokens, heads, dim) for n in chosen])
        k, v = (_dense(chosen, name, kv_heads, dim, torch.bfloat16).transpose(1, 2) for name in "kv")
        return list(zip(*ops.sdpa_multi(q, k, v, _lengths(chosen), **options), strict=True))

    return Subject(call, varies)


def blocks(
    heads: int = 8, kv_heads: int = 2, dim: int = 64, *, page: int = 16, dtype: torch.dtype = torch.bfloat16,
    single: bool = False, **options: Any,
) -> Subject:  # fmt: skip
    """Blocks of queries over pages. ``single``: one query each."""
    varies = "sm90"

    def call(chosen: list[int], seed: int) -> Results:
        counts = [1 if single else min(TOKENS[n], LENGTHS[n]) for n in chosen]
        q = torch.cat([made(n, "q", count, heads, dim, dtype=dtype) for n, count in zip(chosen, counts, strict=True)])
        offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        k, v, table = _paged(chosen, seed, kv_heads, dim, dtype, page)
        found = ops.flash_attention_paged(
            q, k, v, offsets, table, _lengths(chosen), max_seqlen_q=1 << (max(counts) - 1).bit_length(), **options
        )
        return list(zip(*(t.split(counts) for t in found), strict=True))

    return Subject(call, varies)


def packed(heads: int = 8, kv_heads: int = 2, dim: int = 64, **options: Any) -> Subject:
    """Packed sequences among themselves."""
    varies = "sm90"

    def call(chosen: list[int], seed: int) -> Results:
        counts = _lengths(chosen).tolist()
        offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        q, k, v = (
            torch.cat([made(n, name, count, h, dim) for n, count in zip(chosen, counts, strict=True)])
            for name, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        found = ops.flash_attention_varlen(q, k, v, offsets, offsets, **options)[:2]
        return list(zip(*(t.split(counts) for t in found), strict=True))

    return Subject(call, varies)


def padded(heads: int = 8, kv_heads: int = 2, dim: int = 64, varies: str = "", **options: Any) -> Subject:
    """A dense batch of 48 queries each, whose keys have lengths of their own."""

    def call(chosen: list[int], seed: int) -> Results:
        q = torch.stack([made(n, "q", 48, heads, dim) for n in chosen])
        k, v = (_dense(chosen, name, kv_heads, dim, torch.bfloat16) for name in "kv")
        return list(zip(*ops.flash_attention(q, k, v, kv_len=_lengths(chosen), **options)[:2], strict=True))

    return Subject(call, varies)


def alike(heads: int = 32, kv_heads: int = 8, dim: int = 64, varies: str = "sm90", **options: Any) -> Subject:
    """A dense batch of 48 queries at the end of 400 keys each: of 17 sequences there are more tiles than CTAs."""

    def call(chosen: list[int], seed: int) -> Results:
        q, k, v = (
            torch.stack([made(n, name, tokens, h, dim) for n in chosen])
            for name, tokens, h in (("q", 48, heads), ("k", 400, kv_heads), ("v", 400, kv_heads))
        )
        return list(zip(*ops.flash_attention(q, k, v, **options)[:2], strict=True))

    return Subject(call, varies)


def experts(
    format: str = "mxfp4", hidden: int = 256, features: int = 128, dtype: torch.dtype = torch.bfloat16,
    varies: str = "", **options: Any,
) -> Subject:  # fmt: skip
    """Tokens through two FP4 experts each, of as many: from 12 on Hopper multiplies by ``wgmma``."""
    count = 2
    w13, w2 = made(0, "w13", count, 2 * features, hidden), made(0, "w2", count, hidden, features)
    quantize = ops.mxfp4_quantize if format == "mxfp4" else ops.nvfp4_quantize
    matrices = [*quantize(w13 * hidden**-0.5), *quantize(w2 * features**-0.5)]

    def call(chosen: list[int], seed: int) -> Results:
        x = torch.stack([made(n, "x", hidden, dtype=dtype) for n in chosen])
        logits = torch.stack([made(n, "logits", count) for n in chosen])
        weights, indices = logits.float().softmax(-1).topk(2)
        out = ops.fp4_moe(x, weights, indices.int(), *matrices, format=format, **options)
        return [(row,) for row in out]

    return Subject(call, varies)


def rows(op: Callable[..., Any], width: int, *more: torch.Tensor, inputs: int = 1, **options: Any) -> Subject:
    """An op that takes rows, and gives rows."""

    def call(chosen: list[int], seed: int) -> Results:
        given = [torch.stack([made(n, name, width) for n in chosen]) for name in "abc"[:inputs]]
        found = op(*given, *more, **options)
        return list(zip(*(found if isinstance(found, tuple) else (found,)), strict=True))

    return Subject(call)


def hashed(count: int = 16, topk: int = 2) -> Subject:
    table = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i))[:topk] for i in range(50)])

    def call(chosen: list[int], seed: int) -> Results:
        logits = torch.stack([made(n, "logits", count) for n in chosen])
        found = ops.route_hash(logits, torch.tensor([7 * n % 50 for n in chosen]), table)
        return list(zip(*found, strict=True))

    return Subject(call)


def merged(parts: int) -> Subject:
    def call(chosen: list[int], seed: int) -> Results:
        parts_of = [made(n, "parts", parts, 1, 4, 64) for n in chosen]
        lse = [made(n, "lse", parts, 1, 4, dtype=torch.float32) for n in chosen]
        return list(zip(*ops.merge_partials(torch.cat(parts_of, 1), torch.cat(lse, 1)), strict=True))

    return Subject(call)


def subjects() -> dict[str, Subject]:
    """By name. ``tests/invariance`` takes each on every target that has a kernel for it."""
    weight = made(0, "w", 16384)
    return {
        "sdpa_decode": decode(),
        "sdpa_decode, 16 heads of D 128": decode(16, 1, 128, sink=True),
        "sdpa_decode, a window": decode(window=200, sink_tokens=4, varies=""),
        "sdpa_decode_paged": decode(page=16),
        "sdpa_decode_paged, D 128": decode(8, 2, 128, page=32, sink=True),
        "sdpa_decode_paged, soft caps": decode(page=16, softcap=20.0),
        "sdpa_decode_paged over E4M3": decode(page=16, cache=E4M3),
        "sdpa_multi": multi(3),
        "flash_attention_paged": blocks(),
        "flash_attention_paged, D 128": blocks(8, 2, 128, page=16),
        "flash_attention_paged, a window": blocks(window=200),
        "flash_attention_paged, single tokens": blocks(single=True),
        "flash_attention_paged over E4M3": blocks(8, 2, 128, dtype=E4M3),
        "flash_attention_varlen": packed(causal=True),
        "flash_attention_varlen, a window": packed(causal=True, window=200),
        "flash_attention": padded(),
        "flash_attention, many heads and a window": alike(causal=True, window=200),
        "fp4_moe, MXFP4": experts(),
        "fp4_moe, MXFP4, f16": experts(hidden=2880, features=1440, dtype=torch.float16, varies="sm90 metal"),
        "fp4_moe, NVFP4": experts("nvfp4", swiglu="gptoss", limit=7.0, interleaved=True),
        "gated_rmsnorm": rows(ops.gated_rmsnorm, 2048, weight[:2048], inputs=2),
        "gated_rmsnorm of long rows": rows(ops.gated_rmsnorm, 16384, weight, inputs=2),
        "merge_partials": merged(40),
        "route_softmax": rows(ops.route_softmax, 32, topk=4),
        "route_sqrt_softplus": rows(ops.route_sqrt_softplus, 256, topk=6),
        "route_hash": hashed(),
        "nvfp4_quantize": rows(ops.nvfp4_quantize, 256),
        "mxfp4_quantize": rows(ops.mxfp4_quantize, 256),
    }
