"""FlashMLA's sparse attention as vLLM builds it (``_flashmla_C``), for DeepSeek-V4's 512 channels and a sink.

Rows of bfloat16 run the prefill kernel, for any number of tokens: windows and entries lie behind one another in one
tensor, and each token has one list of rows. Rows of FP8 run the decode kernel on two caches, each with lists of its
own, its schedule made before. Caches, lists, and heads padded to what there are kernels for are made outside of the
timing; fewer than 64 heads cost what 64 do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.peers import vllm_ops

_DIM = 512
_HEADS = (64, 128)
PREFILL_STEP, _DECODE_STEP = 128, 64  # lists have multiples of so many places
_PAGE = 64  # rows of the FP8 cache; a page has all their codes, 576 bytes a row, before all scales, 8 a row
_ROPE = 64  # channels
_ROW, _CODES = 584, 576  # bytes
_PAGE_BYTES = 65 * _CODES  # what pages are apart: the first multiple of 576 that they fit


@dataclass(frozen=True)
class Cache:
    """Keys of all requests, as the op has them: (R, S, D), or in pages of a table. Rows count through all of it."""

    held: torch.Tensor
    table: torch.Tensor | None

    @property
    def keys(self) -> int:
        """Of a request."""
        return self.held.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def rows(self) -> torch.Tensor:
        return self.held.flatten(0, 1)

    def row(self, request: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The row of each key (Tq, K) of the token's request (Tq,); -1 stays."""
        page = self.held.shape[1]
        if self.table is None:
            row = request[:, None] * page + key
        else:
            at = (key.long() // page).clamp(min=0)
            row = self.table[request[:, None], at] * page + key % page
        return row.masked_fill(key < 0, -1).int()


@dataclass(frozen=True)
class Lists:
    """Of each cache the rows that each token sees (Tq, K), -1 in place of others."""

    caches: tuple[Cache, ...]
    index: tuple[torch.Tensor, ...]


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op != "sparse_fmha_with_swa" or not kwargs.get("normalize", True):
        return None
    q, format = args[0], kwargs.get("format", "none")
    if q.dtype != torch.bfloat16 or q.shape[2] != _DIM or q.shape[1] > _HEADS[-1]:
        return None
    if format not in ("none", "fp8") or kwargs.get("rope_dim", _ROPE) != _ROPE:
        return None
    scale = kwargs.get("scale")
    run = _decode if format == "fp8" else _prefill
    return run(args, lists(args, kwargs.get("window", 128)), _DIM**-0.5 if scale is None else scale)


def library() -> Any:
    return vllm_ops.library("_flashmla_C", "sparse_prefill_fwd", "_flashmla_C*.so")


def _prefill(args: tuple[Any, ...], seen: Lists, scale: float) -> Callable[[], torch.Tensor]:
    near, *far = seen.index
    first = len(seen.caches[0].rows)  # the entries' rows come behind
    index = torch.cat((near, *(torch.where(i < 0, -1, i + first) for i in far)), 1)
    index, count = packed(index, PREFILL_STEP)
    kv = torch.cat([cache.rows for cache in seen.caches])[:, None]
    (q, sink), heads = _heads(args), args[0].shape[1]
    run, out = library().sparse_prefill_fwd, torch.empty_like(q)

    def call() -> torch.Tensor:
        run(q, kv, index[:, None], scale, _DIM, sink, count, out)
        return out[:, :heads]

    return call


def _decode(args: tuple[Any, ...], seen: Lists, scale: float) -> Callable[[], torch.Tensor]:
    near: list[Any] = []
    far: list[Any] = [None, None, None]
    for given, cache, index in zip((near, far), seen.caches, seen.index, strict=False):
        index, count = packed(index, _DECODE_STEP)
        given[:] = paged(cache.rows), index[:, None], count
    (q, sink), heads = _heads(args), args[0].shape[1]
    run, out = library().sparse_decode_fwd, torch.empty_like(q)[:, None]

    def with_plan(plan: Any, splits: Any) -> Any:
        return run(q[:, None], *near, sink, plan, splits, *far, _DIM, scale, out)

    _, _, plan, splits = with_plan(None, None)

    def call() -> torch.Tensor:
        with_plan(plan, splits)
        return out[:, 0, :heads]

    return call


def lists(args: tuple[Any, ...], window: int) -> Lists:
    q, swa_kv, end, far, chosen, limit, named, _, near_table, far_table, *_ = (*args, *[None] * 10)[:11]
    near, request = Cache(swa_kv, near_table), _requests(q, swa_kv if near_table is None else near_table, named)
    key = end[:, None] - 1 - torch.arange(min(window, near.keys), dtype=torch.int32, device=q.device)  # (Tq, W)
    if far is None:
        return Lists((near,), (near.row(request, key),))
    entries = Cache(far, far_table)
    if chosen is None:
        chosen = torch.arange(entries.keys, dtype=torch.int32, device=q.device).expand(len(q), -1)
    if limit is not None:
        chosen = chosen.masked_fill(chosen >= limit[:, None], -1)
    return Lists((near, entries), (near.row(request, key), entries.row(request, chosen)))


def packed(index: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists (Tq, K) with all that count at the front, padded to a multiple of ``step``, and how many count (Tq,)."""
    absent = index < 0
    order = absent.to(torch.int8).argsort(dim=1, stable=True)
    index = torch.nn.functional.pad(index.gather(1, order), (0, -index.shape[1] % step), value=-1)
    return index.int().contiguous(), (~absent).sum(1, dtype=torch.int32)


def paged(rows: torch.Tensor) -> torch.Tensor:
    """Encoded rows (N, 584) as pages (Np, 64, 1, 584), row i in slot i % 64 of page i // 64."""
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _PAGE)).view(-1, _PAGE, _ROW)
    pages = rows.new_zeros(len(rows), _PAGE_BYTES)
    pages[:, : _PAGE * _CODES] = rows[..., :_CODES].flatten(1)
    pages[:, _PAGE * _CODES : _PAGE * _ROW] = rows[..., _CODES:].flatten(1)
    return pages.as_strided((len(rows), _PAGE, 1, _ROW), (_PAGE_BYTES, _ROW, _ROW, 1))


def _requests(q: torch.Tensor, cache: torch.Tensor, named: torch.Tensor | None) -> torch.Tensor:
    """The request of each token (Tq,)."""
    if named is not None:
        return named.long()
    return torch.arange(len(q), device=q.device) // max(len(q) // max(len(cache), 1), 1)


def _heads(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q (Tq, H, D) and the sink (H,) of a number of heads that there is a kernel for."""
    q, sink = args[0], (*args, *[None] * 8)[7]
    more = next(h for h in _HEADS if h >= q.shape[1]) - q.shape[1]
    padded = torch.nn.functional.pad(q, (0, 0, 0, more))
    return padded, None if sink is None else torch.nn.functional.pad(sink, (0, more))
