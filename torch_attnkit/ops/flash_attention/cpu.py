"""flash_attention on the CPU, through the blocked softmax kernel that PyTorch ships for it.

It runs in float32 whatever the model dtype: in float16 and bfloat16 that kernel sums approximate
exponentials, and its LSE is then wrong in the fifth digit. It knows a dense rectangle, a causal triangle from
the first query and key, and an additive mask; everything but the first two goes through the mask. It adds the
mask to the scores, so a key that nobody sees must be cut off or zeroed first: it may hold nan. It gives a row
without keys an LSE of 0, loses nan among the scores or spreads it to rows that do not see it, and stops the
process when there is no head, query or key: none of these is left to it. It wants one head size, so the smaller
of D and Dv is padded, and in torch 2.8 as many KV heads as query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.kernels.prefill.problem import Operands
from torch_attnkit.oracle import checks
from torch_attnkit.oracle.attention import attend, visible

from .problem import operands

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GROUPED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"  # whether it takes fewer KV heads itself
_SCORES = 1 << 24  # that the definition makes at a time


def _zeroed(t: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """A float32 copy of t (B, S, H, D) with 0 where unseen (B, S). Filling by row beats masked_fill about sevenfold."""
    out = t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    out.flatten(0, 1).index_fill_(0, unseen.flatten().nonzero()[:, 0], 0.0)
    return out


def _padded(t: torch.Tensor, size: int) -> torch.Tensor:
    """t in float32, with zeros up to ``size`` in the last axis: they add nothing to a score or to an output."""
    t = t.float()
    return t if t.shape[-1] == size else torch.nn.functional.pad(t, (0, size - t.shape[-1]))


def _defined(call: Call, o: Operands) -> None:
    """The reference's results, a few queries at a time."""
    T, S = call.dim["T"], call.dim["S"]
    step = max(1, _SCORES // (call.dim["Hq"] * S))
    for b in range(call.dim["B"]):
        start, end = (n if t is None else int(t[b]) for t, n in ((o.kv_start, 0), (o.kv_len, S)))
        for t in range(0, T, step):
            rows = slice(t, min(t + step, T))
            keep = visible(
                torch.arange(S - T + rows.start, S - T + rows.stop)[None], S, start, end,
                causal=call.arg.causal, window=call.arg.window, sink_tokens=call.arg.sink_tokens,
            )  # fmt: skip
            part = attend(o.q[b, None, rows], o.k[b, None], o.v[b, None], keep, scale=call.arg.scale, sink=o.sink)
            o.out[b, rows], o.lse[b, rows] = part[0][0], part[1][0]


def build(call: Call, target: Target) -> Callable[..., None]:
    B, T, S, Hq, D, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "D", "Dv"))
    causal, window, sink_tokens = call.arg.causal, call.arg.window, call.arg.sink_tokens
    scale = D**-0.5 if call.arg.scale is None else call.arg.scale
    triangle = causal and T == S
    dense = window < 0 and (triangle or not causal or T == 1)  # apart from padding

    def nothing(given: Operands) -> None:
        given.out.zero_()
        given.lse.fill_(-torch.inf)

    def launch(*arguments: Any) -> None:
        given = operands(*arguments)
        q, k, v, kv_len, kv_start = given.q, given.k, given.v, given.kv_len, given.kv_start
        checks.in_range(call.op, "kv_len", kv_len, 0, S)
        checks.in_range(call.op, "kv_start", kv_start, 0, S)
        if min(B, T, S, Hq) == 0:
            nothing(given)
            return
        mask = blind = None
        padded = kv_len is not None or kv_start is not None
        if padded or not dense:
            rows = T if causal or window >= 0 else 1  # otherwise all queries see the same keys
            keep = visible(
                torch.arange(S - rows, S).expand(B if padded else 1, rows),
                S,
                0 if kv_start is None else kv_start[:, None],
                S if kv_len is None else kv_len[:, None],
                causal=causal,
                window=window,
                sink_tokens=sink_tokens,
            )  # (B or 1, T or 1, S)
            seen = keep.any(1)  # (B or 1, S)
            hull = seen.any(0).nonzero()
            if len(hull) == 0:
                nothing(given)
                return
            cut = slice(int(hull[0]), int(hull[-1]) + 1)
            k, v, keep, unseen = k[:, cut], v[:, cut], keep[..., cut], ~seen[:, cut].expand(B, -1)
            if bool(unseen.any()):
                k, v = _zeroed(k, unseen), _zeroed(v, unseen)
            blind = ~keep.any(-1, keepdim=True)  # (B or 1, T or 1, 1)
            if bool(blind.any()):  # nobody looks at these queries, and nan among them would choose another way
                q = q.masked_fill(blind[..., None], 0.0)
            mask = torch.zeros(keep.shape, dtype=torch.float32).masked_fill_(~keep, -torch.inf)
            mask = mask[:, None]  # (B or 1, 1, T or 1, S')
        qh, kh, vh = (_padded(t, max(D, Dv)).transpose(1, 2) for t in (q, k, v))  # (B, H, T or S', max(D, Dv))
        # That kernel makes 0 of a row that is nan, and adds the mask to a nan that the row must not see.
        if bool((qh.sum() + kh.sum()).isnan()):
            _defined(call, given)
            return
        if not _GROUPED:
            kh, vh = (t.repeat_interleave(Hq // t.shape[1], 1) for t in (kh, vh))
        alone = triangle and mask is None
        if scale == 0:  # by which that kernel multiplies the -inf of its triangle
            qh = torch.zeros_like(qh)
        o, l = _kernel(qh, kh, vh, 0.0, alone, attn_mask=mask, scale=scale or 1.0)
        o, l = o.transpose(1, 2)[..., :Dv], l.transpose(1, 2)  # (B, T, Hq, Dv), (B, T, Hq)
        if blind is not None and bool(blind.any()):
            o, l = o.masked_fill(blind[..., None], 0.0), l.masked_fill(blind, -torch.inf)
        if bool((l.isnan() | (l == torch.inf)).any()):
            _defined(call, given)
            return
        if given.sink is not None:
            # A sink of -inf where nothing is seen: the difference is nan.
            o = o * (l - given.sink).sigmoid().masked_fill(l == -torch.inf, 0.0)[..., None]
        given.out.copy_(o)
        given.lse.copy_(l)

    return launch
