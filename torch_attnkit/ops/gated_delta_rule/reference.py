"""What gated_delta_rule computes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_attnkit.oracle import checks
from torch_attnkit.oracle.operands import narrow_operands

CHUNK = 32  # tokens
LONG = 128  # from so many tokens on a loop over each takes too long


class Tokens(NamedTuple):
    """Those of a sequence, with keys and queries for each value head as they came, and factors that norm them."""

    q: torch.Tensor  # (T, Hv, K)
    k: torch.Tensor  # (T, Hv, K)
    by_q: torch.Tensor  # (T, Hv, 1)
    by_k: torch.Tensor  # (T, Hv, 1)
    v: torch.Tensor  # (T, Hv, V)
    g: torch.Tensor  # (T, Hv)
    beta: torch.Tensor  # (T, Hv)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    state_index: torch.Tensor,
    past: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Token by token, from ``LONG`` tokens on in chunks; inside ``narrow_products`` in chunks whose operands have 16
    bits, as tensor cores take them."""
    (Tq, Hk, K), stored = q.shape, q.dtype
    checks.cu_seqlens("gated_delta_rule", "cu_seqlens", cu_seqlens, Tq)
    checks.in_range("gated_delta_rule", "state_index", state_index, -1, state.shape[0] - 1)
    acc = torch.promote_types(stored, torch.float32)
    q, k = (x.to(acc).repeat_interleave(v.shape[1] // Hk, 1) for x in (q, k))  # (Tq, Hv, K)
    ones = torch.ones_like(k[..., :1])
    by_q, by_k = ((x.square().sum(-1, keepdim=True) + eps).rsqrt() if qk_l2norm else ones for x in (q, k))
    by_q = by_q * (K**-0.5 if scale is None else scale)
    tokens = Tokens(q, k, by_q, by_k, v.to(acc), g.to(acc), beta.to(acc))
    out = torch.zeros_like(v)  # (Tq, Hv, V)
    length = cu_seqlens.diff()
    for b in ((state_index >= 0) & (length > 0)).nonzero()[:, 0].tolist():
        slot, first = int(state_index[b]), int(cu_seqlens[b])
        S = state[slot].to(acc).clone()  # (Hv, V, K)
        if past is not None and int(past[b]) == 0:
            S.zero_()
        span = slice(first, first + int(length[b]))
        of_sequence = Tokens(*(t[span] for t in tokens))
        narrow = narrow_operands(stored)
        if narrow or int(length[b]) >= LONG:
            rows, S = in_chunks(of_sequence, S, stored if narrow else None)
        else:
            rows, S = by_token(of_sequence, S)
        out[span], state[slot] = rows.to(v.dtype), S.to(state.dtype)
    return out


def by_token(x: Tokens, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows (T, Hv, V) of a sequence that begins with S (Hv, V, K), which changes, and the last S."""
    q, k, decay = x.q * x.by_q, x.k * x.by_k, x.g.exp()
    rows = []
    for t in range(len(q)):
        S *= decay[t, :, None, None]
        u = x.beta[t, :, None] * (x.v[t] - (S @ k[t, :, :, None])[..., 0])  # (Hv, V)
        S.addcmul_(u[..., None], k[t, :, None, :])
        rows.append((S @ q[t, :, :, None])[..., 0])
    return torch.stack(rows), S


def in_chunks(x: Tokens, S: torch.Tensor, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by chunks of ``CHUNK`` tokens. With a ``dtype`` S has its bits where it is multiplied, and what goes
    into S those of two terms; products of tokens with each other, v - S k' and the corrections have float16's.

    With G the sum of g over the chunk up to a token, and a factor e^(G_i - G_j) between tokens i >= j: the corrections
    are V' = (I + L)^-1 beta (v - e^G S k'), with L_ij = beta_i k'_i k'_j for i > j."""
    model = (lambda t: t) if dtype is None else (lambda t: t.to(dtype).to(t.dtype))
    half = (lambda t: t) if dtype is None else (lambda t: t.to(torch.float16).to(t.dtype))
    two_terms = (lambda t: t) if dtype is None else (lambda t: model(t) + model(t - model(t)))
    rows = []
    for begin in range(0, len(x.q), CHUNK):
        # (Hv, n, ..)
        q, k, by_q, by_k, v, g, beta = (t[begin : begin + CHUNK].transpose(0, 1) for t in x)
        sums = g.cumsum(-1)  # (Hv, n)
        lower = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril()
        between = (sums[:, :, None] - sums[:, None, :]).masked_fill(~lower, -torch.inf).exp()  # (Hv, n, n)
        L = (beta[..., None] * by_k * by_k.mT * (k @ k.mT) * between).tril(-1)
        identity = torch.eye(g.shape[1], dtype=g.dtype, device=g.device).expand_as(L)
        inverse = torch.linalg.solve_triangular(L + identity, identity, upper=False, unitriangular=True)
        products = half(by_q * by_k.mT * (q @ k.mT) * between)
        grown = sums.exp()[..., None]  # (Hv, n, 1)
        found = half(v - grown * by_k * (k @ model(S).mT))  # (Hv, n, V)
        corrections = half(inverse * beta[:, None, :]) @ found
        rows.append(grown * by_q * (q @ model(S).mT) + products @ half(corrections))
        left = (sums[:, -1:] - sums).exp()[..., None]
        S = sums[:, -1, None, None].exp() * S + two_terms(corrections * left * by_k).mT @ k
    return torch.cat(rows, 1).transpose(0, 1), S
