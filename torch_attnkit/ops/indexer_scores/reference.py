"""What indexer_scores computes."""

from __future__ import annotations

import torch

from torch_attnkit.formats import mxfp4
from torch_attnkit.oracle import checks, tensor_cores


def _dense(x: torch.Tensor, scale: torch.Tensor | None, format: str, acc: torch.dtype) -> torch.Tensor:
    """q or k (..., Qb) in its format to numbers (..., Di)."""
    if scale is None:
        return x.to(acc)
    return mxfp4.dequantize(x, scale, acc) if format == "mxfp4" else x.to(acc) * scale.to(acc)


def _rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x[at]; float8 cannot be indexed by a tensor everywhere."""
    return x.view(torch.uint8)[at].view(x.dtype) if x.dtype.itemsize == 1 else x[at]


def _products(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    format: str,
    acc: torch.dtype,
) -> torch.Tensor:
    """q (t, Hi, Qb) times k (n, Qb) in their format: (t, Hi, n).

    Inside ``narrow_products`` those of E4M3 numbers are added up as tensor cores do, before their scales: what the
    kernels are for takes eight bits, and sums of 14 (``oracle/tensor_cores.py``).
    """
    if format == "fp8" and acc == torch.float32 and tensor_cores.narrow_e4m3():
        s = tensor_cores.products(q, k)
        if q_scale is not None:
            s = s * q_scale
        return s if k_scale is None else s * k_scale[:, 0]
    return torch.einsum("thd,nd->thn", _dense(q, q_scale, format, acc), _dense(k, k_scale, format, acc))


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    k_len: torch.Tensor,
    request_ids: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    format: str = "none",
) -> torch.Tensor:
    (Tq, _, _), (Rk, Sk, _) = q.shape, k.shape
    R, S = (Rk, Sk) if block_table is None else (block_table.shape[0], block_table.shape[1] * Sk)
    checks.in_range("indexer_scores", "k_len", k_len, 0, S)
    checks.in_range("indexer_scores", "request_ids", request_ids, 0, R - 1)
    acc = torch.float64 if torch.float64 in (q.dtype, weights.dtype) else torch.float32
    token = torch.arange(Tq, device=q.device)
    owner = token * R // max(Tq, 1) if request_ids is None else request_ids  # (Tq,)
    w = weights.to(acc)  # (Tq, Hi)
    scores = torch.full((Tq, S), -torch.inf, dtype=torch.float32, device=q.device)  # (Tq, S)
    for r in owner.unique().tolist():
        rows = (owner == r).nonzero()[:, 0]  # (t,)
        length = k_len[rows, None]  # (t, 1)
        n = int(length.max())
        if block_table is None:
            kr, kr_scale = k[r], None if k_scale is None else k_scale[r]
        else:
            pages = block_table[r, : -(-n // Sk) if n else 0].long()
            checks.in_range("indexer_scores", f"block_table[{r}]", pages, 0, Rk - 1)
            kr = _rows(k, pages).flatten(0, 1)
            kr_scale = None if k_scale is None else k_scale[pages].flatten(0, 1)
        qr = _rows(q, rows)  # (t, Hi, Qb)
        qr_scale, kr_scale = None if q_scale is None else q_scale[rows], None if kr_scale is None else kr_scale[:n]
        s = _products(qr, qr_scale, kr[:n], kr_scale, format, acc).relu()  # (t, Hi, n)
        s = (s * w[rows, :, None]).sum(1)  # (t, n)
        unseen = torch.arange(n, device=q.device) >= length
        scores[rows, :n] = s.masked_fill(unseen, -torch.inf).to(torch.float32)
    return scores
