"""The calls that a model's layers make of the ops, on meta tensors: nothing is computed, plans alone are made of them.

Batches, contexts and lengths are cut so finely that every kernel is met that a plan chooses for any number between
their ends; ``tests/test_served.py`` draws sizes in between. A plan counts multiprocessors: 132, those of an H100 and of
an H200 (``driver.sm_count``). Not among them are kernels for tensors that begin at odd addresses, which no model makes,
and of ``indexer_topk`` those of rows whose number of entries is no multiple of 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.batched_gemm import MOST_FEW

from .models import Attention, Delta, Experts, Model, Norm, Sparse

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)  # with several queries each
CONTEXTS = tuple(1 << n for n in range(10, 18))  # 1024 .. 131072 keys
PROMPTS = tuple(1 << n for n in range(4, 15))  # 16 .. 16384 tokens of one sequence
BLOCKS = tuple(1 << n for n in range(15))  # queries of the longest sequence of a mixed batch
TOKENS = (*BATCHES, *(1 << n for n in range(9, 15)))  # .. 16384 tokens of a step
EVERY = (*range(1, 257), *(n << k for k in range(5, 11) for n in range(9, 17)))  # the same where plans change often
ENTRIES = tuple(n << k for k in range(5, 12) for n in range(8, 16))  # 256 .. 30720 compressed entries of a sequence
ROWS = tuple(n << k for k in range(2, 12) for n in (8, 11))  # 32 .. 22528 of a weight
SHARES = (1, 2, 4, 8)  # processes that have a share each of heads, or of experts
PAGES = (16, 64)  # keys of a page of vLLM's; continuous batching in transformers has 256, whose kernels are others
MOST_TOKENS = 16384  # of a step
_F32, _I32, _I64, _U8, _E4M3 = torch.float32, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True)
class Asked:
    """A call of ``op``."""

    op: str
    args: tuple[Any, ...]
    options: dict[str, Any]


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of_models(models: Iterable[Model], dtypes: Iterable[torch.dtype]) -> Iterator[Asked]:
    """The calls of ``models`` in each of ``dtypes``; what several have alike is asked once."""
    parts = dict.fromkeys(part for model in models for part in _parts(model))
    for (calls, part), dtype in itertools.product(parts, dtypes):
        yield from calls(part, dtype)


def _parts(model: Model) -> Iterator[tuple[Callable[[Any, torch.dtype], Iterator[Asked]], Any]]:
    """What makes calls of a part, and the part: whole and in shares."""
    for share in shares(model.attention):
        yield from ((of_attention, replace(share, windows=(window,))) for window in share.windows)
    if model.experts is not None:
        yield from ((of_router, model.experts), (of_experts, model.experts))
    if model.sparse is not None:
        yield from ((of_sparse, replace(model.sparse, heads=model.sparse.heads // n)) for n in SHARES)
        yield of_sparse_projection, model.sparse
    yield of_products, model.experts is not None and model.experts.bias
    if model.norm is not None:
        yield from ((of_norm, replace(model.norm, rows=model.norm.rows // n)) for n in SHARES)
    if model.delta is not None:
        yield of_delta, model.delta


def shares(attention: Attention | None) -> list[Attention]:
    """``attention`` as each process has it, where heads divide; KV heads that are fewer are repeated."""
    if attention is None:
        return []
    return [
        replace(attention, heads=attention.heads // n, kv_heads=max(1, attention.kv_heads // n))
        for n in SHARES
        if attention.heads % n == 0 and (attention.kv_heads % n == 0 or n % attention.kv_heads == 0)
    ]


# Attention.


def of_attention(a: Attention, dtype: torch.dtype) -> Iterator[Asked]:
    for window in a.windows:
        given = a, dtype, meta(_F32, a.heads) if a.sink else None
        options = dict(scale=a.dim**-0.5, window=window, softcap=a.softcap)
        yield from _decode(*given, options)
        yield from _decode_paged(*given, options)
        if not a.latent:
            for calls in (_prefill, _multi, _prefill_paged):
                yield from calls(*given, options)
    yield from _latent_prompts(a, dtype) if a.latent else _stored(a, dtype)
    if a.sink:
        yield from _appended(a, dtype)


def _appended(a: Attention, dtype: torch.dtype) -> Iterator[Asked]:
    """A token a sequence into transformers' static cache, which GPT-OSS' layers have: rotated, with their sinks. A
    window that is full has no slot."""
    for B, S, slot in itertools.product(BATCHES, CONTEXTS, (None, _I32, _I64)):
        q, key = (meta(dtype, B, h, a.dim) for h in (a.heads, a.kv_heads))
        cache = [meta(dtype, B, a.kv_heads, S, a.dim) for _ in range(2)]
        angles = [meta(dtype, 1, 1, a.dim // 2) for _ in range(2)]
        sink = meta(dtype, a.heads)
        args = q, key, key, *cache, *angles, None if slot is None else meta(slot, 1), sink
        yield Asked("rope_kv_cache_append", args, {})


def _decode(a: Attention, dtype: torch.dtype, sink: Any, options: dict[str, Any]) -> Iterator[Asked]:
    """One token a sequence over a dense cache; with a window it may hold no more than that. None holds E4M3."""
    own = (options["window"],) if options["window"] > 0 else ()
    for B, S in itertools.product(BATCHES, (*own, *CONTEXTS)):
        k = meta(dtype, B, a.kv_heads, S, a.dim)
        v = k[..., : a.latent] if a.latent else k
        yield Asked("sdpa_decode", (meta(dtype, B, a.heads, a.dim), k, v, meta(_I32, B), sink), options)


def _decode_paged(a: Attention, dtype: torch.dtype, sink: Any, options: dict[str, Any]) -> Iterator[Asked]:
    for B, S, stored in itertools.product(BATCHES, CONTEXTS, (dtype,) if a.latent else (dtype, _E4M3)):
        for page, (k, v) in _pages(a, B * S, stored):
            scale = _scale(B, a, stored)
            args = (
                meta(dtype, B, a.heads, a.dim), k, v, meta(_I32, B, -(-S // page)), meta(_I32, B), sink, None, None,
                scale, scale,
            )  # fmt: skip
            yield Asked("sdpa_decode_paged", args, options)


def _prefill(a: Attention, dtype: torch.dtype, sink: Any, options: dict[str, Any]) -> Iterator[Asked]:
    """Prompts, chunks of them behind others, and packed sequences."""
    for B, T in itertools.product(SEQUENCES, PROMPTS):
        for S in (T, *(n for n in CONTEXTS if n > T and B * n <= CONTEXTS[-1])):
            if B * T > CONTEXTS[-1]:
                continue
            q = meta(dtype, B, a.heads, T, a.dim).transpose(1, 2)
            k = meta(dtype, B, a.kv_heads, S, a.dim).transpose(1, 2)
            for length in (None, meta(_I32, B)):
                yield Asked("flash_attention", (q, k, k, sink, length), dict(options, causal=True))
    for n, T in itertools.product(SEQUENCES, PROMPTS):
        q, k = (meta(dtype, h, T, a.dim).transpose(0, 1) for h in (a.heads, a.kv_heads))
        cu = meta(_I32, n + 1)
        for hints in ({}, dict(max_seqlen_q=-(-T // n), max_seqlen_k=-(-T // n))):
            yield Asked("flash_attention_varlen", (q, k, k, cu, cu, sink), dict(options, causal=True, **hints))


def _multi(a: Attention, dtype: torch.dtype, sink: Any, options: dict[str, Any]) -> Iterator[Asked]:
    """A static cache: blocks of queries at a place that only the device knows, drafts too."""
    for B, T, S in itertools.product(SEQUENCES, (2, 3, 4, 5, 6, 8, *PROMPTS), CONTEXTS):
        if T > S or B * S > 4 * CONTEXTS[-1]:
            continue
        q = meta(dtype, B, a.heads, T, a.dim).transpose(1, 2)
        k = meta(dtype, B, a.kv_heads, S, a.dim)
        yield Asked("sdpa_multi", (q, k, k, meta(_I32, B), sink, None), dict(options, causal=True))


def _prefill_paged(a: Attention, dtype: torch.dtype, sink: Any, options: dict[str, Any]) -> Iterator[Asked]:
    """Mixed batches: the longest block of queries among others of one token, all as long, or half of the tokens."""
    for B, longest, S in itertools.product((*SEQUENCES, 128, 256), BLOCKS, CONTEXTS[::2]):
        totals = {longest + B - 1, min(B * longest, MOST_TOKENS), min(B * -(-longest // 2) + longest, MOST_TOKENS)}
        for tokens, stored in itertools.product(totals if longest <= S else (), (dtype, _E4M3)):
            for page, (k, v) in _pages(a, B * S, stored):
                table, scale = meta(_I32, B, -(-S // page)), _scale(B, a, stored)
                q = meta(dtype, tokens, a.heads, a.dim)
                args = q, k, v, meta(_I32, B + 1), table, meta(_I32, B), sink, None, scale, scale
                yield Asked("flash_attention_paged", args, dict(options, max_seqlen_q=longest, max_seqlen_k=S))


def _stored(a: Attention, dtype: torch.dtype) -> Iterator[Asked]:
    """Keys and values of a step's tokens, by themselves or columns of a product with q, into vLLM's caches."""
    alone = [meta(dtype, MOST_TOKENS, a.kv_heads, a.dim)] * 2
    q, kv = a.heads * a.dim, a.kv_heads * a.dim
    columns = meta(dtype, MOST_TOKENS, q + 2 * kv).split((q, kv, kv), 1)[1:]
    joined = [part.unflatten(1, (a.kv_heads, a.dim)) for part in columns]
    slot, scale = meta(_I64, MOST_TOKENS), meta(_F32)
    for (key, value), stored in itertools.product((alone, joined), (dtype, _E4M3)):
        for _, caches in _pages(a, MOST_TOKENS, stored):
            for scales in ((None, None), (scale, scale))[: 2 if stored is _E4M3 else 1]:
                yield Asked("paged_kv_cache_write", (key, value, *caches, slot, *scales), {})


def _latent_prompts(a: Attention, dtype: torch.dtype) -> Iterator[Asked]:
    """Prompts of vLLM's MLA layers and chunks of their cached context, whose values are columns of a product, and rows
    of the cache: latents beside rotated keys, which are columns of a product, too."""
    dim, value = a.prompt
    rope = a.dim - a.latent

    def packed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        product = meta(dtype, tokens, a.heads, dim - rope + value)
        return meta(dtype, tokens, a.heads, dim), product[..., dim - rope :]

    for n, T in itertools.product(SEQUENCES, PROMPTS):
        cu, (q, _) = meta(_I32, n + 1), packed(T)
        for S, causal in ((T, True), *((S, False) for S in CONTEXTS)):
            k, v = packed(S)
            for longest, most in {(-(-T // n), -(-S // n)), (T, S)}:
                hints = dict(max_seqlen_q=1 << (longest - 1).bit_length(), max_seqlen_k=1 << (most - 1).bit_length())
                options = dict(scale=dim**-0.5, causal=causal, **hints)
                yield Asked("flash_attention_varlen", (q, k, v, cu, cu, None), options)
    slot, latent = meta(_I64, MOST_TOKENS), meta(dtype, MOST_TOKENS, 1, a.latent)
    alone, joined = meta(dtype, MOST_TOKENS, 1, rope), meta(dtype, MOST_TOKENS, 1, a.dim)[..., a.latent :]
    for k_rope, (_, (rows, values)) in itertools.product((alone, joined), _pages(a, MOST_TOKENS, dtype)):
        yield Asked("paged_kv_cache_write", (latent, k_rope, values, rows[..., a.latent :], slot), {})


def _pages(a: Attention, keys: int, stored: torch.dtype) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """vLLM's caches: keys beside values, or latents that are both."""
    for page in PAGES:
        if a.latent:
            rows = meta(stored, -(-keys // page), page, 1, a.dim)
            yield page, (rows, rows[..., : a.latent])
            continue
        both = meta(stored, -(-keys // page), page, a.kv_heads, 2 * a.dim)
        k, v = both.chunk(2, -1)
        yield page, (k, v)


def _scale(batch: int, a: Attention, stored: torch.dtype) -> torch.Tensor | None:
    return meta(_F32, batch, a.kv_heads) if stored is _E4M3 else None


# Products of a decode step.


def of_products(bias: bool, dtype: torch.dtype) -> Iterator[Asked]:
    """To q, k and v, from heads, and of routers: plans ask for the number of rows, so that shares are among these."""
    for tokens, rows in itertools.product(range(1, MOST_FEW + 1), ROWS):
        x, weight = meta(dtype, tokens, 4096), meta(dtype, rows, 4096)
        yield Asked("linear_decode", (x, weight, meta(dtype, rows) if bias else None), {})


# Experts.


def of_router(e: Experts, dtype: torch.dtype) -> Iterator[Asked]:
    for rows, logits in itertools.product(EVERY, (dtype, _F32)):
        scores = meta(logits, rows, e.count)
        if e.router == "softmax":
            yield Asked("route_softmax", (scores,), dict(topk=e.topk))
        elif e.router == "softmax-first":
            yield Asked("route_softmax", (scores,), dict(topk=e.topk, softmax_first=True, renormalize=e.renormalize))
        elif e.router == "sqrt-softplus":
            yield Asked("route_sqrt_softplus", (scores, meta(_F32, e.count)), dict(topk=e.topk))
        if e.table:
            for ids in (_I32, _I64):
                yield Asked("route_hash", (scores, meta(_I64, rows), meta(ids, 1 << 17, e.topk)), {})


def of_experts(e: Experts, dtype: torch.dtype) -> Iterator[Asked]:
    """All experts whole, a share of them, and of each one a share of its features."""
    cut = [(e.count // n, e.width) for n in SHARES] + [(e.count, e.width // n) for n in SHARES[1:] if e.sliced]
    for (count, width), form, tokens in itertools.product(cut, e.formats, EVERY):
        block = 32 if form == "mxfp4" else 16
        if width % block:
            continue
        weights = (
            meta(_U8, count, 2 * width, e.hidden // 2), meta(_U8, count, 2 * width, e.hidden // block),
            meta(_U8, count, e.hidden, width // 2), meta(_U8, count, e.hidden, width // block),
        )  # fmt: skip
        divisor = meta(_F32, count) if form == "nvfp4" else None
        biases = (meta(dtype, count, 2 * width), meta(dtype, count, e.hidden)) if e.bias else (None, None)
        options = dict(format=form, swiglu=e.swiglu, limit=e.limit, interleaved=e.interleaved)
        # Ours and vLLM's routers choose in int32, transformers' own in int64.
        for ids in (_I32,) if e.router else (_I32, _I64):
            chosen = meta(_F32, tokens, e.topk), meta(ids, tokens, e.topk)
            args = meta(dtype, tokens, e.hidden), *chosen, *weights, divisor, divisor, *biases
            yield Asked("fp4_moe", args, options)


# DeepSeek-V4's attention.


def of_sparse(s: Sparse, dtype: torch.dtype) -> Iterator[Asked]:
    """A decode step or a prompt: rows of the model's dtype, dense, as transformers has them; FP8's in pages."""
    for tokens in TOKENS:
        for batch in sorted({tokens if tokens <= BATCHES[-1] else 1, 1}):
            yield from _sparse_rows(s, dtype, tokens, batch)
        yield from _sparse_pages(s, dtype, tokens)


def _sparse_rows(s: Sparse, dtype: torch.dtype, tokens: int, batch: int) -> Iterator[Asked]:
    q, limit, sink = meta(dtype, tokens, s.heads, s.dim), meta(_I32, tokens), meta(_F32, s.heads)
    each = tokens // batch
    near = meta(dtype, batch, s.window + each, s.dim)
    options = dict(scale=s.dim**-0.5, window=s.window)
    for angle in (dtype, _F32):
        row, angles = meta(dtype, tokens, s.dim), meta(angle, tokens, s.rope // 2)
        yield Asked("rope_kv_cache_write", (q, row, row, limit, angles, angles), dict(rope_dim=s.rope))
    yield Asked("sparse_fmha_with_swa", (q, near, limit, None, None, None, None, sink), options)
    for context in CONTEXTS:
        far, every = (meta(dtype, batch, context // n, s.dim) for n in (4, 128))
        chosen = meta(_I32, tokens, min(s.topk, context // 4))
        yield Asked("sparse_fmha_with_swa", (q, near, limit, far, chosen, limit, None, sink), options)
        for seen in (limit, None):
            yield Asked("sparse_fmha_with_swa", (q, near, limit, every, None, seen, None, sink), options)
        index = meta(dtype, tokens, s.index_heads, s.index_dim), meta(dtype, batch, context // 4, s.index_dim)
        yield Asked("indexer_scores", (*index, meta(_F32, tokens, s.index_heads), limit), {})
    for entries in (*ENTRIES, CONTEXTS[-1] // 4):
        scores = meta(_F32, tokens, entries)
        yield Asked("indexer_topk", (scores, limit), dict(topk=min(s.topk, entries)))


def _sparse_pages(s: Sparse, dtype: torch.dtype, tokens: int, page: int = 64) -> Iterator[Asked]:
    """What ``bench.layers --peers`` runs beside a server's kernels: rows of FP8, keys of the indexer too."""
    size = kv_cache.row_bytes("fp8", s.dim, s.rope)
    q, limit, sink = meta(dtype, tokens, s.heads, s.dim), meta(_I32, tokens), meta(_F32, s.heads)
    rows, slot, angles = meta(_U8, 1 << 16, size), meta(_I64, tokens), meta(_F32, tokens, s.rope // 2)
    fp8 = dict(format="fp8", rope_dim=s.rope)
    yield Asked("rope_kv_cache_write", (q, meta(dtype, tokens, s.dim), rows, slot, angles, angles), fp8)
    if tokens > BATCHES[-1]:
        return
    for context in CONTEXTS:
        near = meta(_U8, tokens * 4, page, size), meta(_I32, tokens, 4)
        far = meta(_U8, tokens * context // 4 // page, page, size), meta(_I32, tokens, context // 4 // page)
        chosen = meta(_I32, tokens, min(s.topk, context // 4))
        args = (q, near[0], limit, far[0], chosen, limit, None, sink, near[1], far[1])
        yield Asked("sparse_fmha_with_swa", args, dict(scale=s.dim**-0.5, window=s.window, **fp8))
    for entries in (*ENTRIES, CONTEXTS[-1] // 4):
        pages, table = tokens * -(-entries // page), meta(_I32, tokens, -(-entries // page))
        q, k, scale = (
            meta(_E4M3, tokens, s.index_heads, s.index_dim), meta(_E4M3, pages, page, s.index_dim),
            meta(_F32, pages, page, 1),
        )  # fmt: skip
        given = q, k, meta(_F32, tokens, s.index_heads), limit, None, table, None, scale
        yield Asked("indexer_select", given, dict(format="fp8", topk=min(s.topk, entries)))


def of_sparse_projection(s: Sparse, dtype: torch.dtype) -> Iterator[Asked]:
    columns = s.heads * s.dim // s.groups
    for tokens, share in itertools.product(EVERY, SHARES):
        groups = max(1, s.groups // share)
        args = meta(dtype, tokens, groups, columns), meta(dtype, groups, s.rank, columns)
        yield Asked("grouped_output_projection", args, {})


def of_norm(n: Norm, dtype: torch.dtype) -> Iterator[Asked]:
    for tokens, weight in itertools.product(EVERY, (dtype, _F32)):
        rows = meta(dtype, tokens * n.rows, n.features)
        yield Asked("gated_rmsnorm", (rows, rows, meta(weight, n.features)), {})


def of_delta(d: Delta, dtype: torch.dtype) -> Iterator[Asked]:
    """A token of a sequence, a few, and prompts, as ``attnkit_model`` has them. Plans of a step do not ask for heads
    and sequences; those of prompts cut few heads otherwise than many, and the convolution's ask for tokens a
    sequence."""
    keys, values, gates = (d.key_heads, d.dim), (d.value_heads, d.dim), (d.value_heads,)
    q, k, v, a, b = (meta(dtype, 1, 1, *sizes) for sizes in (keys, keys, values, gates, gates))
    state, slots = meta(_F32, 1, d.value_heads, d.dim, d.dim), meta(_I32, 1, 1)
    for rate, bias in itertools.product((dtype, _F32), repeat=2):
        args = q, k, v, a, b, meta(rate, *gates), meta(bias, *gates), state, slots
        yield Asked("gated_delta_step", args, {})
    channels = 2 * d.key_heads * d.dim + d.value_heads * d.dim
    for tokens in (1, 4, 64):
        convolved = meta(dtype, tokens, channels), meta(dtype, channels, 4), meta(dtype, 1, channels, 4)
        yield Asked("causal_conv1d", (*convolved, meta(_I32, 2), meta(_I32, 1)), {})
    for B in (1, 64):
        packed = [meta(dtype, B, *sizes) for sizes in (keys, keys, values)]
        packed += [meta(_F32, B, *gates), meta(dtype, B, *gates)]
        state = meta(_F32, B, d.value_heads, d.dim, d.dim)
        yield Asked("gated_delta_rule", (*packed, state, meta(_I32, B + 1), meta(_I32, B)), {})
