"""Masked softmax attention in plain torch: the one definition behind every attention reference.

Positions are integers per sequence. A query at position p sees key j when every rule that is switched on allows it:
causal (j <= p), window (p - W < j, and j < p + W when not causal), the valid range [start, end), sink tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch

Scales = Sequence[torch.Tensor | None]  # of q, k and v, (B, Hkv) each
_narrow: ContextVar[bool] = ContextVar("attnkit_oracle_narrow_products", default=False)


@contextlib.contextmanager
def narrow_products() -> Iterator[None]:
    """Inside, ``attend`` rounds the probabilities of E4M3 inputs to E4M3, as a product of E4M3 operands has to.

    This is what "the reference in the tensors' own dtype" means for the tolerance (``compare.py``). In every other
    dtype rounding P costs out no more than storing out does: half an ulp of each weight, so ``4 eps max|ref64|``
    covers both. E4M3 keeps 4 bits of P and out has 8: with d_j the relative error of weight w_j, |d_j| <= 2^-4,

        error = sum_j w_j d_j v_j,    |error| <= 2^-4 sum_j w_j |v_j|,

    which for one key is up to 16 roundings of out, and falls as the signs of the d_j cancel: the d_j of different keys
    are as good as independent, with a standard deviation of 2^-3 / sqrt(24) = 0.026 for significands spread evenly over
    [1, 2), so that of the error is 0.026 sqrt(sum_j (w_j v_j)^2), about 0.026 |v| / sqrt(n) for n keys of like weight.
    No constant follows from that for all inputs, and none is needed: the same roundings of the same weights, made here,
    have the same distribution, and the largest of many draws from it moves little from one set of draws to another. A
    kernel whose maxima lag by a power of two makes the same draws; one that subtracts something else makes others.

    P is rounded at 2^8 P, whose largest value is 256 of E4M3's 448: a weight down to 2^-14 of the row's largest keeps 4
    bits, one below 2^-18 becomes 0. ``lse`` and ``row_sum`` are sums of P before it is rounded.

    References of other products of E4M3 add them up as tensor cores do (``oracle/tensor_cores.py``).
    """
    token = _narrow.set(True)
    try:
        yield
    finally:
        _narrow.reset(token)


def _dequantized(t: torch.Tensor, scale: torch.Tensor | None, acc: torch.dtype) -> torch.Tensor:
    """t (B, T, H, D) in ``acc``, times its scale (B, Hkv), which the heads of a group share."""
    if scale is None:
        return t.to(acc)
    return t.to(acc) * scale.to(acc).repeat_interleave(t.shape[2] // scale.shape[1], 1)[:, None, :, None]


def visible(
    pos: torch.Tensor,
    n_keys: int,
    start: torch.Tensor | int,
    end: torch.Tensor | int,
    *,
    causal: bool,
    window: int,
    sink_tokens: int,
) -> torch.Tensor:
    """Which keys each query sees: pos (B, T), start and end (B, 1) or ints -> bool (B, T, n_keys).

    A query whose position lies before ``start`` or is negative sees nothing under ``causal``.
    """
    key = torch.arange(n_keys, device=pos.device)  # (S,)
    p = pos.long()[..., None]  # (B, T, 1)
    first = torch.as_tensor(start, device=pos.device)[..., None]  # (B, 1, 1)
    # Callers may say "all" with any large number; these cannot overflow.
    window, sink_tokens = min(window, 2**31), min(sink_tokens, n_keys)
    keep = (key >= first) & (key < torch.as_tensor(end, device=pos.device)[..., None])
    keep = keep.expand(*pos.shape, n_keys)  # (B, T, S)
    if window >= 0:
        near = key > p - window
        if not causal:
            near = near & (key < p + window)
        keep = keep & (near | (key < first + sink_tokens))
    if causal:
        keep = keep & (key <= p)
    return keep


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float | None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    normalize: bool = True,
    scales: Scales = (None, None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of q (B, T, Hq, D) over k (B, S, Hkv, D), v (B, S, Hkv, Dv) where keep (B, T, S) is true.

    Returns out (B, T, Hq, Dv) in q's dtype, bfloat16 for E4M3, lse (B, T, Hq) and row_sum (B, T, Hq) in the
    accumulation dtype (float32, or float64 for float64 inputs). Rows that see nothing give out 0, lse -inf, row_sum 0,
    whatever their sink is. ``sink`` (Hq) joins the denominator only; ``lse`` and ``row_sum`` leave it out. q, k and v
    stand for themselves times their ``scales``.

    NaN in q, in a key or in the sink reaches the rows that have it in their scores or sums, and no other. A value that
    is infinite or NaN may also reach queries that do not see it, if it lies in the valid range of their sequence: they
    multiply it by 0, here and in kernels, which take keys by the tile.
    """
    B, T, Hq, D = q.shape
    Hkv, Dv = k.shape[2], v.shape[3]
    codes = q.dtype == torch.float8_e4m3fn
    stored = torch.bfloat16 if codes else q.dtype
    acc = torch.promote_types(stored, torch.float32)
    q, k, v = (_dequantized(t, by, acc) for t, by in zip((q, k, v), scales, strict=True))
    qg = q.reshape(B, T, Hkv, Hq // Hkv, D)
    s = torch.einsum("bthgd,bshd->bthgs", qg, k) * (D**-0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~keep[:, :, None, None, :], -torch.inf).flatten(2, 3)  # (B, T, Hq, S)
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)  # (B, T, Hq)
    base = top.masked_fill(top == -torch.inf, 0.0)  # an empty row subtracts 0 and keeps exp(-inf) = 0
    p = (s - base[..., None]).exp()
    row_sum = p.sum(-1)  # (B, T, Hq)
    lse = base + row_sum.log()  # log(0) = -inf for an empty row
    # Masked values may be anything, nan included: a weight of 0 must not meet them.
    seen = keep.any(1)[..., None, None]  # (B, S, 1, 1)
    vg = v.masked_fill(~seen, 0.0)
    if codes and _narrow.get():
        p = (p * 256).to(torch.float8_e4m3fn).to(p.dtype) / 256
    o = torch.einsum("bthgs,bshd->bthgd", p.unflatten(2, (Hkv, Hq // Hkv)), vg).reshape(B, T, Hq, Dv)
    if normalize:
        total = row_sum
        if sink is not None:
            total = total + (sink.to(acc) - base).exp()  # the sink as a virtual key with value 0
        o = o / total.masked_fill(row_sum == 0, 1.0)[..., None]  # a row without keys is 0 already
    return o.to(stored).contiguous(), lse.contiguous(), row_sum.contiguous()
