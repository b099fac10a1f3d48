"""A step of vLLM as calls of the paged ops: views of its cache, what is written to it, and what attends. No vLLM here.

vLLM stores keys and values side by side: a layer's cache is (Np, Hkv, Ps, 2D), with the tokens of a page inside or
outside its heads in memory. Both halves are the ops' (Np, Ps, Hkv, D) as views. Nothing is copied on the way: new keys
and values are written from where they lie, and attention writes into vLLM's own output.

Caches of E4M3 hold keys and values divided by a scale. Queries attend them in the model's dtype.

The cache of an MLA layer is (Np, Ps, rank + rope): a row is the latent of a token and its rotated key. Decode reads it
as the one KV head of all queries, whose values are the first ``rank`` columns of the same rows. Prompts are attended as
heads of their own, whose keys and values the layer makes of latents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_attnkit.core import Target, UnsupportedError, invariance
from torch_attnkit.core.dispatch import OPS, resolve

ops = torch.ops.attnkit
MIXED, SINGLE, PROMPTS = "flash_attention_paged", "sdpa_decode_paged", "flash_attention_varlen"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Layer:
    """What an attention layer asks of the ops in every step. ``window`` is the number of keys that a query sees, -1 all
    of them; ``softcap`` 0 is off; ``page`` is the number of keys of a page."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page: int
    scale: float | None = None
    window: int = -1
    softcap: float = 0.0
    sink: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return dict(scale=self.scale, window=self.window, softcap=self.softcap)

    @property
    def fp8(self) -> bool:
        """Whether caches are E4M3."""
        return self.cache_dtype is E4M3


@dataclass(frozen=True)
class Scales:
    """What k and v in E4M3 stand for themselves times, float32 (R, Hkv) each: a row a request, all rows alike. They
    are made once for a layer, so that no step spreads a number over its requests."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, given: tuple[torch.Tensor, ...], requests: int, kv_heads: int) -> Scales:
        """From one number or one a KV head (Hkv,) for each of k and v."""
        return cls(*(scale.detach().float().flatten().expand(requests, kv_heads).contiguous() for scale in given))

    def rows(self, requests: int) -> dict[str, torch.Tensor]:
        """As arguments of an op that attends so many requests."""
        return {"k_scale": self.k[:requests], "v_scale": self.v[:requests]}


@dataclass(frozen=True)
class Step:
    """The batch of a step, for every layer of a cache group: B requests with ``tokens`` query tokens in all.

    ``cu_seqlens_q`` (B+1,), ``block_table`` (B, Mp) and ``kv_len`` (B,) are int32 and stay on the device. A request
    that pads the batch has no query, or one of a length of 0. ``max_seqlen_q`` and ``max_seqlen_k`` bound the lengths:
    powers of two, so that a plan serves more than the one step.
    """

    tokens: int
    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    kv_len: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(
        cls, tokens: int, cu_seqlens_q: torch.Tensor, block_table: torch.Tensor, kv_len: torch.Tensor,
        longest_q: int, longest_k: int,
    ) -> Step:  # fmt: skip
        """A step from vLLM's metadata, whose tensors may be longer than the batch."""
        requests = cu_seqlens_q.shape[0] - 1
        return cls(
            tokens, cu_seqlens_q.int(), block_table[:requests].int(), kv_len[:requests].int(),
            _power_of_two(longest_q), _power_of_two(longest_k),
        )  # fmt: skip

    def to_capture(self, given: tuple[torch.Tensor, ...], longest_k: int) -> Step:
        """This step for a CUDA graph, which is replayed for batches whose keys are at most ``longest_k``.

        The graph reads offsets, table and lengths where they are now, in memory of vLLM's: ``given`` are those tensors.
        Raises UnsupportedError where the step has copies of them, which no replay would see change.
        """
        tensors = (self.cu_seqlens_q, self.block_table, self.kv_len)
        for name, a, b in zip(("query_start_loc", "block_table", "seq_lens"), tensors, given, strict=True):
            if a.numel() and a.data_ptr() != b.data_ptr():
                raise UnsupportedError(
                    f"attnkit for vLLM: {name} is {b.dtype} where a CUDA graph is captured, accepted: torch.int32"
                )
        return replace(self, max_seqlen_k=_power_of_two(longest_k))

    @property
    def single(self) -> bool:
        """Whether every request has one query token."""
        return self.max_seqlen_q == 1 and self.tokens == self.kv_len.shape[0]


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's cache (Np, Hkv, Ps, 2D): two views (Np, Ps, Hkv, D). Bytes are E4M3."""
    if kv_cache.dtype is torch.uint8:
        kv_cache = kv_cache.view(E4M3)
    k, v = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k, v


def store(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, scales: Scales | None = None
) -> None:
    """Write the tokens' key and value (T, Hkv, D) into the cache (Np, Hkv, Ps, 2D): token t goes to page ``slots[t] //
    Ps``, place ``slots[t] % Ps``; slots (at most T,) of -1 are skipped, and tokens past the last slot. A cache of E4M3
    has ``scales``."""
    n = slots.shape[0]
    by = () if scales is None else (scales.k[0], scales.v[0])
    ops.paged_kv_cache_write(key[:n], value[:n], *halves(kv_cache), slots, *by)


def attend(
    layer: Layer, step: Step, q: torch.Tensor, kv_cache: torch.Tensor, sink: torch.Tensor | None, out: torch.Tensor,
    *, decode: bool, scales: Scales | None = None,
) -> None:  # fmt: skip
    """Attention of the step's queries (Tq, Hq, D) over the cache, their own keys in it, into out (Tq, Hq, D). Causal.

    ``sink`` is (Hq,) float32. ``decode``, of ``supports_decode``, allows ``sdpa_decode_paged`` where every request
    has one token. A cache of E4M3 has ``scales``.
    """
    k, v = halves(kv_cache)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)  # nobody reads it
    requests = step.kv_len.shape[0]
    options = layer.options | ({} if scales is None else scales.rows(requests))
    if decode and step.single:
        ops.sdpa_decode_paged_out(q, k, v, step.block_table, step.kv_len, sink, **options, out=out, lse=lse)
        return
    ops.flash_attention_paged_out(
        q, k, v, step.cu_seqlens_q, step.block_table, step.kv_len, sink, max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_k, **options, out=out, lse=lse,
    )  # fmt: skip


def supports_decode(layer: Layer, target: Target) -> bool:
    """Whether ``sdpa_decode_paged`` has the steps in which every request has one token.

    Not where the batch must not decide on bits: a token alone then goes the way of one in a block of queries. What is
    in the batch decides how prompts are cut, whether a step is mixed, and which request is computed anew.
    """
    return not invariance.is_on() and refusal(SINGLE, layer, target) is None


def refusal(op: str, layer: Layer, target: Target) -> str | None:
    """Why no row of ``op`` on ``target`` takes the layer; None where one does, or its definition runs (a CPU)."""
    kv_cache = _meta(layer.cache_dtype, 2, layer.page, layer.kv_heads, 2 * layer.dim)
    k, v = halves(kv_cache.transpose(1, 2))
    # vLLM makes the model's dtype torch's default while it builds layers.
    sink = _meta(torch.float32, layer.heads) if layer.sink else None
    scale = _meta(torch.float32) if layer.fp8 else None
    q = _meta(layer.dtype, 2, layer.heads, layer.dim)
    return _refusal(
        op, target, dict(q=q, k_cache=k, v_cache=v, sink=sink, k_scale=scale, v_scale=scale, **layer.options)
    )


def _refusal(op: str, target: Target, given: dict[str, Any]) -> str | None:
    """Why no row of ``op`` takes a call of two requests with ``given`` arguments."""
    record, lengths, offsets = OPS[op], _meta(torch.int32, 2), _meta(torch.int32, 3)
    batch = dict(
        block_table=_meta(torch.int32, 2, 1), kv_len=lengths, cu_seqlens_q=offsets, cu_seqlens_k=offsets
    )  # fmt: skip
    given = batch | given
    try:
        call = record.bind(tuple(given.get(name, record.defaults.get(name)) for name in record.argnames))
        resolve(record, call, target)
    except (TypeError, ValueError, UnsupportedError) as error:
        return str(error)
    return None


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# MLA.


@dataclass(frozen=True)
class LatentLayer:
    """What an MLA layer asks of the ops. Rows of the cache have ``rank + rope`` columns, heads of prompts ``nope +
    rope`` for q and k and ``value`` for v; ``page`` is the number of rows of a page."""

    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    page: int
    scale: float | None = None


def latents(kv_cache: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (Np, Ps, 1, rank + rope) and values (Np, Ps, 1, rank) of an MLA layer's cache (Np, Ps, rank + rope): views
    of the same rows."""
    k = kv_cache.unsqueeze(2)
    return k, k[..., :rank]


def store_latents(latent: torch.Tensor, k_rope: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the tokens' latent (T, rank) and rotated key (T, 1, rope) side by side into a row each of the cache (Np,
    Ps, rank + rope): token t goes to page ``slots[t] // Ps``, place ``slots[t] % Ps``; slots (at most T,) of -1 are
    skipped, and tokens past the last slot."""
    n, rank = slots.shape[0], latent.shape[1]
    k, v = latents(kv_cache, rank)
    ops.paged_kv_cache_write(latent[:n].unsqueeze(1), k_rope[:n], v, k[..., rank:], slots)


def token_rows(block_table: torch.Tensor, kv_len: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Table and lengths of a batch in which every token is a request of its own: of ``each`` tokens of a request, the
    last sees ``kv_len`` keys and one before it one key less. (B, Mp) and (B,) become (B * each, Mp) and (B * each,);
    lengths of requests that pad the batch stay 0."""
    if each == 1:
        return block_table, kv_len
    later = torch.arange(each - 1, -1, -1, dtype=kv_len.dtype, device=kv_len.device)
    return block_table.repeat_interleave(each, 0), (kv_len[:, None] - later).clamp(min=0).flatten()


def decode_latents(
    layer: LatentLayer, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, kv_len: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One absorbed query q (B, Hq, rank + rope) a row of the table, over the cache (Np, Ps, rank + rope) with its own
    row in it: out (B, Hq, rank) and the natural-log LSE (B, Hq) in float32, 0 and -inf where kv_len is 0."""
    k, v = latents(kv_cache, layer.rank)
    return ops.sdpa_decode_paged(q, k, v, block_table, kv_len, scale=layer.scale)


@dataclass(frozen=True)
class Packed:
    """Packed queries and keys of B requests: offsets (B+1,) int32 on the device, and bounds of the lengths."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    longest_q: int
    longest_k: int


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, *, scale: float | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (Tq, H, D) over k (Tk, H, D) and v (Tk, H, Dv), each request over its own keys: out (Tq, H, Dv)
    and the natural-log LSE (Tq, H) in float32, 0 and -inf for a request without keys. ``causal`` aligns the last query
    with the last key."""
    out, lse, _ = ops.flash_attention_varlen(
        q, k, v, packed.cu_seqlens_q, packed.cu_seqlens_k, scale=scale, causal=causal,
        max_seqlen_q=_power_of_two(packed.longest_q), max_seqlen_k=_power_of_two(packed.longest_k),
    )  # fmt: skip
    return out, lse


def refusal_of_latents(layer: LatentLayer, target: Target, *, prompts: bool = True) -> str | None:
    """Why no row on ``target`` takes the layer's decode, or with ``prompts`` its prompts; None where rows take them, or
    the definitions run (a CPU)."""
    k, v = latents(_meta(layer.cache_dtype, 2, layer.page, layer.rank + layer.rope), layer.rank)
    q = _meta(layer.dtype, 2, layer.heads, layer.rank + layer.rope)
    word = _refusal(SINGLE, target, dict(q=q, k_cache=k, v_cache=v, scale=layer.scale))
    if word or not prompts:
        return word
    q = _meta(layer.dtype, 2, layer.heads, layer.nope + layer.rope)
    v = _meta(layer.dtype, 2, layer.heads, layer.nope + layer.value)[..., layer.nope :]
    return _refusal(PROMPTS, target, dict(q=q, k=q, v=v, scale=layer.scale, causal=True))
