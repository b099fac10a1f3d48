"""Calls of ops whose parts are sequences, or tokens, that a test may put together as it likes: ``subjects()``.

A pool of sequences lies ready. ``call(chosen, seed)`` puts those with the chosen numbers into one call, in that order,
and gives each one's results; ``seed`` decides on where pages lie. The same number is the same sequence, to the bit.
All tensors are on torch's default device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ops = torch.ops.attnkit
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Results = list[tuple[torch.Tensor, ...]]
Given = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
# Keys of the pool's sequences: at the edges of tiles and of what one CTA attends alone (512), and far beyond.
LENGTHS = (1, 1600, 63, 64, 65, 511, 512, 513, 700, 127, 129, 1025, 16, 300, 900, 33, 257, 1, 2, 640)
# New tokens of each, for ops that take blocks of queries.
TOKENS = (1, 1, 5, 1, 65, 2, 1, 130, 1, 17, 1, 3, 16, 40, 1, 33, 1, 1, 2, 200)


@dataclass(frozen=True)
class Subject:
    """``given``: the op and its arguments; ``counts``: how many rows of a result each sequence has, None one of an axis
    of its own; ``varies``: the targets on which a test sees bits depend on the batch without the option."""

    given: Callable[[list[int], int], Given]
    varies: str = ""
    counts: Callable[[list[int]], list[int]] | None = None

    def call(self, chosen: list[int], seed: int) -> Results:
        op, args, options = self.given(chosen, seed)
        return self.parts(chosen, op(*args, **options))

    def parts(self, chosen: list[int], found: Any) -> Results:
        """The results of each sequence."""
        tensors = found if isinstance(found, tuple) else (found,)
        if self.counts is None:
            return list(zip(*(t for t in tensors if t.numel()), strict=True))
        counts = self.counts(chosen)
        return list(zip(*(t.split(counts) for t in tensors if t.numel()), strict=True))


def made(number: int, name: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """What sequence ``number`` has by a name: the same numbers whatever it is put beside."""
    seed = 1000 * number + sum(map(ord, name))
    return torch.randn(shape, generator=torch.Generator(torch.get_default_device()).manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Caches:
    """Keys and values of the pool: KV heads, columns, how long each sequence is, and their dtype."""

    kv_heads: int
    dim: int
    lengths: tuple[int, ...] = LENGTHS
    dtype: torch.dtype = BF16

    def of(self, chosen: list[int]) -> list[int]:
        return [self.lengths[n % len(self.lengths)] for n in chosen]

    def kv_len(self, chosen: list[int]) -> torch.Tensor:
        return torch.tensor(self.of(chosen), dtype=torch.int32)

    def paged(self, chosen: list[int], seed: int, page: int) -> list[torch.Tensor]:
        """k, v (Np, Ps, Hkv, D) and the table: pages in an order that follows from ``seed``, NaN where no key is."""
        lengths, gen = self.of(chosen), torch.Generator(torch.get_default_device()).manual_seed(seed)
        used = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(used) + 1 + seed % 7, generator=gen).int()
        both = torch.full((2, len(order), page, self.kv_heads, self.dim), torch.nan, dtype=torch.half).to(self.dtype)
        table = torch.full((len(chosen), max(used) + seed % 3), 1 << 30, dtype=torch.int32)
        for b, (n, length) in enumerate(zip(chosen, lengths, strict=True)):
            table[b, : used[b]] = order[sum(used[:b]) :][: used[b]]
            for cache, name in zip(both, "kv", strict=True):
                rows = torch.full((used[b] * page, self.kv_heads, self.dim), torch.nan).to(self.dtype)
                rows[:length] = made(n, name, length, self.kv_heads, self.dim, dtype=self.dtype)
                cache[table[b, : used[b]].long()] = rows.view(used[b], page, self.kv_heads, self.dim)
        return [both[0], both[1], table]

    def dense(self, chosen: list[int], name: str) -> torch.Tensor:
        """(B, S, Hkv, D), as long as the longest needs, and 40 more."""
        lengths = self.of(chosen)
        rows = torch.zeros(len(chosen), max(lengths) + 40, self.kv_heads, self.dim).to(self.dtype)
        for b, (n, length) in enumerate(zip(chosen, lengths, strict=True)):
            rows[b, :length] = made(n, name, length, self.kv_heads, self.dim, dtype=self.dtype)
        return rows


def decode(
    heads: int, caches: Caches, *, page: int = 0, sink: bool = False, varies: str = "sm90 sm100 metal", **options: Any
) -> Subject:
    """One query a sequence, of 16 bits."""

    def given(chosen: list[int], seed: int) -> Given:
        q = torch.stack([made(n, "q", heads, caches.dim) for n in chosen])
        kv_len = caches.kv_len(chosen)
        more = {"sink": made(0, "sink", heads, dtype=torch.float32)} if sink else {}
        if page:
            return ops.sdpa_decode_paged, (q, *caches.paged(chosen, seed, page), kv_len), options | more
        k, v = (caches.dense(chosen, name).transpose(1, 2) for name in "kv")
        return ops.sdpa_decode, (q, k, v, kv_len), options | more

    return Subject(given, varies)


def latents(heads: int, lengths: tuple[int, ...] = LENGTHS) -> Subject:
    """One absorbed query a sequence over MLA's latents, whose first 512 columns are values."""
    caches = Caches(1, 576, lengths)

    def given(chosen: list[int], seed: int) -> Given:
        q = torch.stack([made(n, "q", heads, 576) for n in chosen])
        k, _, table = caches.paged(chosen, seed, 64)
        return ops.sdpa_decode_paged, (q, k, k[..., :512], table, caches.kv_len(chosen)), dict(scale=192**-0.5)

    return Subject(given, "sm90 sm100")


def multi(tokens: int, heads: int, caches: Caches, **options: Any) -> Subject:
    """``tokens`` queries a sequence, at the end of its cache."""

    def given(chosen: list[int], seed: int) -> Given:
        q = torch.stack([made(n, "q", tokens, heads, caches.dim) for n in chosen])
        k, v = (caches.dense(chosen, name).transpose(1, 2) for name in "kv")
        return ops.sdpa_multi, (q, k, v, caches.kv_len(chosen)), options

    return Subject(given, "sm90 sm100 metal")


def blocks(
    heads: int,
    caches: Caches,
    *,
    page: int = 16,
    tokens: tuple[int, ...] = TOKENS,
    varies: str = "sm90",
    queries: torch.dtype | None = None,
    **options: Any,
) -> Subject:
    """Blocks of queries over pages; ``queries``: the dtype of q, None is that of the caches."""

    def counts(chosen: list[int]) -> list[int]:
        return [min(tokens[n % len(tokens)], length) for n, length in zip(chosen, caches.of(chosen), strict=True)]

    def given(chosen: list[int], seed: int) -> Given:
        each = counts(chosen)
        rows = [
            made(n, "q", count, heads, caches.dim, dtype=queries or caches.dtype)
            for n, count in zip(chosen, each, strict=True)
        ]
        offsets = torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        k, v, table = caches.paged(chosen, seed, page)
        longest = 1 << (max(each) - 1).bit_length()
        args = torch.cat(rows), k, v, offsets, table, caches.kv_len(chosen)
        return ops.flash_attention_paged, args, dict(max_seqlen_q=longest) | options

    return Subject(given, varies, counts)


def packed(heads: int, caches: Caches, varies: str = "sm90", **options: Any) -> Subject:
    """Packed sequences among themselves."""

    def given(chosen: list[int], seed: int) -> Given:
        counts = caches.of(chosen)
        offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        q, k, v = (
            torch.cat([made(n, name, count, h, caches.dim) for n, count in zip(chosen, counts, strict=True)])
            for name, h in (("q", heads), ("k", caches.kv_heads), ("v", caches.kv_heads))
        )
        return ops.flash_attention_varlen, (q, k, v, offsets, offsets), options

    return Subject(given, varies, caches.of)


def padded(heads: int, caches: Caches, varies: str = "", **options: Any) -> Subject:
    """A dense batch of 48 queries each, whose keys have lengths of their own."""

    def given(chosen: list[int], seed: int) -> Given:
        q = torch.stack([made(n, "q", 48, heads, caches.dim) for n in chosen])
        k, v = (caches.dense(chosen, name) for name in "kv")
        return ops.flash_attention, (q, k, v), dict(kv_len=caches.kv_len(chosen)) | options

    return Subject(given, varies)


def alike(heads: int, kv_heads: int, dim: int, varies: str = "sm90", **options: Any) -> Subject:
    """A dense batch of 48 queries at the end of 400 keys each: of 17 sequences there are more tiles than CTAs."""

    def given(chosen: list[int], seed: int) -> Given:
        three = (("q", 48, heads), ("k", 400, kv_heads), ("v", 400, kv_heads))
        args = (torch.stack([made(n, name, tokens, h, dim) for n in chosen]) for name, tokens, h in three)
        return ops.flash_attention, tuple(args), options

    return Subject(given, varies)


def experts(
    format: str, hidden: int, features: int, dtype: torch.dtype = BF16, count: int = 2, topk: int = 2, varies: str = "",
    **options: Any,
) -> Subject:  # fmt: skip
    """Tokens through FP4 experts: from 12 an expert on Hopper multiplies by ``wgmma``."""
    w13, w2 = made(0, "w13", count, 2 * features, hidden), made(0, "w2", count, hidden, features)
    quantize = ops.mxfp4_quantize if format == "mxfp4" else ops.nvfp4_quantize
    matrices = [*quantize(w13 * hidden**-0.5), *quantize(w2 * features**-0.5)]

    def given(chosen: list[int], seed: int) -> Given:
        x = torch.stack([made(n, "x", hidden, dtype=dtype) for n in chosen])
        logits = torch.stack([made(n, "logits", count) for n in chosen])
        weights, indices = logits.float().softmax(-1).topk(topk)
        return ops.fp4_moe, (x, weights, indices.int(), *matrices), dict(format=format) | options

    return Subject(given, varies)


def rows(op: Callable[..., Any], width: int, *more: torch.Tensor, inputs: int = 1, **options: Any) -> Subject:
    """An op that takes rows, and gives rows."""

    def given(chosen: list[int], seed: int) -> Given:
        return op, (*(torch.stack([made(n, name, width) for n in chosen]) for name in "abc"[:inputs]), *more), options

    return Subject(given)


def hashed(count: int = 16, topk: int = 2) -> Subject:
    table = torch.stack([made(i, "table", count).argsort()[:topk] for i in range(50)])

    def given(chosen: list[int], seed: int) -> Given:
        logits = torch.stack([made(n, "logits", count) for n in chosen])
        return ops.route_hash, (logits, torch.tensor([7 * n % 50 for n in chosen]), table), {}

    return Subject(given)


def merged(parts: int) -> Subject:
    def given(chosen: list[int], seed: int) -> Given:
        parts_of = [made(n, "parts", parts, 1, 4, 64) for n in chosen]
        lse = [made(n, "lse", parts, 1, 4, dtype=torch.float32) for n in chosen]
        return ops.merge_partials, (torch.cat(parts_of, 1), torch.cat(lse, 1)), {}

    return Subject(given)


def subjects() -> dict[str, Subject]:
    """By name. ``test_bits.py`` takes each on every target that has a kernel for it."""
    weight, narrow, wide = made(0, "w", 16384), Caches(2, 64), Caches(2, 128)
    gptoss = dict(swiglu="gptoss", limit=7.0, interleaved=True)
    return {
        "sdpa_decode": decode(8, narrow),
        "sdpa_decode, 16 heads of D 128": decode(16, Caches(1, 128), sink=True),
        "sdpa_decode, a window": decode(8, narrow, window=200, sink_tokens=4, varies=""),
        "sdpa_decode_paged": decode(8, narrow, page=16),
        "sdpa_decode_paged, D 128": decode(8, wide, page=32, sink=True),
        "sdpa_decode_paged, soft caps": decode(8, narrow, page=16, softcap=20.0),
        "sdpa_decode_paged over E4M3": decode(8, Caches(2, 64, dtype=E4M3), page=16),
        "sdpa_decode_paged, latents": latents(16),
        "sdpa_multi": multi(3, 8, narrow),
        "flash_attention_paged": blocks(8, narrow),
        "flash_attention_paged, D 128": blocks(8, wide),
        "flash_attention_paged, a window": blocks(8, narrow, window=200),
        "flash_attention_paged, single tokens": blocks(8, narrow, tokens=(1,)),
        "flash_attention_paged over E4M3": blocks(8, Caches(2, 128, dtype=E4M3), queries=BF16),
        "flash_attention_paged of E4M3": blocks(8, Caches(2, 128, dtype=E4M3)),
        "flash_attention_varlen": packed(8, narrow, causal=True),
        "flash_attention_varlen, a window": packed(8, narrow, causal=True, window=200),
        "flash_attention": padded(8, narrow),
        "flash_attention, many heads and a window": alike(32, 8, 64, causal=True, window=200),
        "fp4_moe, MXFP4": experts("mxfp4", 256, 128),
        "fp4_moe, MXFP4, f16": experts("mxfp4", 2880, 1440, torch.float16, varies="sm90 metal"),
        "fp4_moe, NVFP4": experts("nvfp4", 256, 128, **gptoss),
        "gated_rmsnorm": rows(ops.gated_rmsnorm, 2048, weight[:2048], inputs=2),
        "gated_rmsnorm of long rows": rows(ops.gated_rmsnorm, 16384, weight, inputs=2),
        "merge_partials": merged(40),
        "route_softmax": rows(ops.route_softmax, 32, topk=4),
        "route_sqrt_softplus": rows(ops.route_sqrt_softplus, 256, topk=6),
        "route_hash": hashed(),
        "nvfp4_quantize": rows(ops.nvfp4_quantize, 256),
        "mxfp4_quantize": rows(ops.mxfp4_quantize, 256),
    }
