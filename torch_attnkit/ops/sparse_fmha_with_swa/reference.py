"""What sparse_fmha_with_swa computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import kv_cache
from torch_attnkit.oracle import checks, fp4
from torch_attnkit.oracle.attention import attend

NAME = "sparse_fmha_with_swa"
CHUNK = 1 << 24  # gathered key elements at a time: every token has keys of its own, which would not fit at once


def reference(
    q: torch.Tensor,
    swa_kv: torch.Tensor,
    swa_end: torch.Tensor,
    compressed_kv: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    compressed_len: torch.Tensor | None = None,
    request_ids: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    swa_block_table: torch.Tensor | None = None,
    compressed_block_table: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 128,
    normalize: bool = True,
    format: str = "none",
    rope_dim: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    Tq, Hq, D = q.shape
    (R, S), C = _keys(swa_kv, swa_block_table), 0
    if compressed_kv is not None:
        _, C = _keys(compressed_kv, compressed_block_table)
    checks.in_range(NAME, "swa_end", swa_end, 0, S)
    checks.in_range(NAME, "topk_indices", topk_indices, -1, C - 1)
    checks.in_range(NAME, "compressed_len", compressed_len, 0, C)
    checks.in_range(NAME, "request_ids", request_ids, 0, R - 1)
    if topk_indices is not None:
        checks.distinct(NAME, "topk_indices", topk_indices)
    fp4.check_global(NAME, global_scale=global_scale)

    token = torch.arange(Tq, device=q.device)
    request = token * R // max(Tq, 1) if request_ids is None else request_ids.long()  # (Tq,)
    W = min(window, S)
    near = swa_end[:, None] - W + torch.arange(W, device=q.device)  # (Tq, W) keys of the window, negative before 0
    far = torch.arange(C, device=q.device).expand(Tq, C) if topk_indices is None else topk_indices  # (Tq, K)
    far = far[:, : far.shape[1] if C else 0]  # without entries every index is -1
    limit = far.new_full((Tq,), C) if compressed_len is None else compressed_len  # (Tq,)
    seen = near >= 0, (far >= 0) & (far < limit[:, None])  # (Tq, W), (Tq, K)
    keep = torch.cat(seen, 1)  # (Tq, W + K)
    _check_pages("swa", swa_kv, swa_block_table, request, near, seen[0])
    _check_pages("compressed", compressed_kv, compressed_block_table, request, far, seen[1])
    if format == "none":
        decode = lambda rows: rows
    else:
        decode = lambda rows: kv_cache.decode_rows(rows, format, D, rope_dim, global_scale, q.dtype)

    acc = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(Tq, Hq, D)
    lse, row_sum = (q.new_empty(Tq, Hq, dtype=acc) for _ in range(2))
    for t in token.split(max(1, CHUNK // max(1, keep.shape[1] * D))):
        rows = [_rows(swa_kv, swa_block_table, request[t], near[t], seen[0][t])]  # (t, W, Rb)
        if compressed_kv is not None:
            rows.append(_rows(compressed_kv, compressed_block_table, request[t], far[t], seen[1][t]))  # (t, K, Rb)
        kv = decode(torch.cat(rows, 1))[:, :, None]  # (t, W + K, 1, D): one KV head
        o, l, s = attend(q[t, None], kv, kv, keep[t, None], scale=scale, sink=sink, normalize=normalize)
        out[t], lse[t], row_sum[t] = o[:, 0], l[:, 0], s[:, 0]
    return out, lse, row_sum.new_empty(0) if normalize else row_sum


def _keys(cache: torch.Tensor, table: torch.Tensor | None) -> tuple[int, int]:
    """Requests, and the keys of each."""
    first, size, _ = cache.shape
    return (first, size) if table is None else (table.shape[0], table.shape[1] * size)


def _check_pages(
    kind: str,
    cache: torch.Tensor | None,
    table: torch.Tensor | None,
    request: torch.Tensor,  # (Tq,)
    key: torch.Tensor,  # (Tq, n) of the request
    seen: torch.Tensor,  # (Tq, n)
) -> None:
    """Every page with a key that a token sees must be one of the cache."""
    if cache is None or table is None:
        return
    pages, size, _ = cache.shape
    looked_at = torch.zeros_like(table, dtype=torch.bool)  # (R, M)
    looked_at[request[:, None].expand_as(key)[seen], key[seen].long() // size] = True
    if pages == 0 and bool(looked_at.any()):
        raise ValueError(f"{NAME}: {kind}_kv has no pages, accepted: a page for every key that a token sees")
    checks.in_range(NAME, f"{kind}_block_table", table.masked_fill(~looked_at, 0), 0, max(pages - 1, 0))


def _rows(
    cache: torch.Tensor, table: torch.Tensor | None, request: torch.Tensor, key: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """The rows (t, n, Rb) of ``key`` (t, n) of tokens' requests (t,); any where ``seen`` (t, n) is false."""
    if not bool(seen.any()):
        return cache.new_zeros(*key.shape, cache.shape[2])
    key, request = key.long().where(seen, 0), request[:, None]
    if table is None:
        return cache[request, key]
    page = table[request, key // cache.shape[1]].long().where(seen, 0)
    return cache[page, key % cache.shape[1]]
