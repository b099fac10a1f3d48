"""Attention of many queries on the CPU: in C++ (``csrc/cpu/blocks.cpp``) on processors with AVX-512, else through the
blocked softmax kernel that PyTorch ships for it.

That runs in float32 whatever the model dtype: in float16 and bfloat16 that kernel sums approximate
exponentials, and its LSE is then wrong in the fifth digit. It knows a dense rectangle, a causal triangle from
the first query and key, and an additive mask; everything but the first two goes through the mask. It adds the
mask to the scores, so a key that nobody sees must be cut off or zeroed first: it may hold nan. It gives a row
without keys an LSE of 0, loses nan among the scores or spreads it to rows that do not see it, and stops the
process when there is no head, query or key: none of these is left to it. It wants one head size, so the smaller
of D and Dv is padded, and in torch 2.8 as many KV heads as query heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_attnkit.cpu.blocks import Blocks, Sequence, addresses
from torch_attnkit.oracle.attention import attend, visible

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GROUPED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"  # whether it takes fewer KV heads itself
_SCORES = 1 << 24  # that the definition makes at a time


class Rules(NamedTuple):
    """Which keys a query sees, and the factor of the scores."""

    causal: bool
    window: int
    sink_tokens: int
    scale: float

    @classmethod
    def of(cls, dim: int, a: Any) -> Rules:
        """By the head size and the arguments of the table."""
        return cls(a.causal, a.window, a.sink_tokens, dim**-0.5 if a.scale is None else a.scale)


class Block(NamedTuple):
    """Queries (B, T, Hq, D), of which the last stands at the last of the keys (B, S, Hkv, D) and values (B, S, Hkv,
    Dv), results (B, T, Hq, Dv) and (B, T, Hq), a sink (Hq), and the first key and the end of each sequence (B)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    sink: torch.Tensor | None
    start: torch.Tensor | None = None
    end: torch.Tensor | None = None


def _zeroed(t: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """A float32 copy of t (B, S, H, D) with 0 where masked (B, S). Filling by row beats masked_fill about sevenfold."""
    out = t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    out.flatten(0, 1).index_fill_(0, masked.flatten().nonzero()[:, 0], 0.0)
    return out


def _padded(t: torch.Tensor, size: int) -> torch.Tensor:
    """t in float32, with zeros up to ``size`` in the last axis: they add nothing to a score or to an output."""
    t = t.float()
    return t if t.shape[-1] == size else torch.nn.functional.pad(t, (0, size - t.shape[-1]))


def _defined(rules: Rules, o: Block) -> None:
    """The reference's results, a few queries at a time."""
    (B, T, Hq), S = o.q.shape[:3], o.k.shape[1]
    step = max(1, _SCORES // (Hq * S))
    for b in range(B):
        start, end = (n if t is None else int(t[b]) for t, n in ((o.start, 0), (o.end, S)))
        for t in range(0, T, step):
            rows = slice(t, min(t + step, T))
            keep = visible(
                torch.arange(S - T + rows.start, S - T + rows.stop, device="cpu")[None], S, start, end,
                causal=rules.causal, window=rules.window, sink_tokens=rules.sink_tokens,
            )  # fmt: skip
            part = attend(o.q[b, None, rows], o.k[b, None], o.v[b, None], keep, scale=rules.scale, sink=o.sink)
            o.out[b, rows], o.lse[b, rows] = part[0][0], part[1][0]


def nothing(out: torch.Tensor, lse: torch.Tensor) -> None:
    out.zero_()
    lse.fill_(-torch.inf)


def in_blocks(kernel: Blocks | None, found: list[Block]) -> bool:
    """Fill the results of all blocks by ``csrc/cpu/blocks.cpp``. False: it does not take them."""
    if kernel is None:
        return False
    sequences = []
    for o in found:
        (B, T), S = o.q.shape[:2], o.k.shape[1]
        starts, ends = ([n] * B if t is None else t.tolist() for t, n in ((o.start, 0), (o.end, S)))
        locations = (addresses(t, B) for t in (o.q, o.k, o.v, o.out, o.lse, None))
        sequences += [
            Sequence._make((*location, T, S, start, end))
            for location, start, end in zip(zip(*locations, strict=True), starts, ends, strict=True)
        ]
    return kernel(sequences, found[0].sink if found else None)


def solve(rules: Rules, o: Block) -> None:
    """Fill ``out`` and ``lse``."""
    (B, T, Hq, D), S, Dv = o.q.shape, o.k.shape[1], o.v.shape[3]
    if min(B, T, S, Hq) == 0:
        nothing(o.out, o.lse)
        return
    triangle = rules.causal and T == S
    dense = rules.window < 0 and (triangle or not rules.causal or T == 1)  # apart from padding
    q, k, v, mask, blind = o.q, o.k, o.v, None, None
    padded = o.start is not None or o.end is not None
    if padded or not dense:
        rows = T if rules.causal or rules.window >= 0 else 1  # otherwise all queries see the same keys
        keep = visible(
            torch.arange(S - rows, S, device="cpu").expand(B if padded else 1, rows),
            S,
            0 if o.start is None else o.start[:, None],
            S if o.end is None else o.end[:, None],
            causal=rules.causal,
            window=rules.window,
            sink_tokens=rules.sink_tokens,
        )  # (B or 1, T or 1, S)
        seen = keep.any(1)  # (B or 1, S)
        hull = seen.any(0).nonzero()
        if len(hull) == 0:
            nothing(o.out, o.lse)
            return
        cut = slice(int(hull[0]), int(hull[-1]) + 1)
        k, v, keep, masked = k[:, cut], v[:, cut], keep[..., cut], ~seen[:, cut].expand(B, -1)
        if bool(masked.any()):
            k, v = _zeroed(k, masked), _zeroed(v, masked)
        blind = ~keep.any(-1, keepdim=True)  # (B or 1, T or 1, 1)
        if bool(blind.any()):  # nobody looks at these queries, and nan among them would choose another way
            q = q.masked_fill(blind[..., None], 0.0)
        mask = torch.zeros(keep.shape, dtype=torch.float32, device="cpu").masked_fill_(~keep, -torch.inf)
        mask = mask[:, None]  # (B or 1, 1, T or 1, S')
    qh, kh, vh = (_padded(t, max(D, Dv)).transpose(1, 2) for t in (q, k, v))  # (B, H, T or S', max(D, Dv))
    # That kernel makes 0 of a row that is nan, and adds the mask to a nan that the row must not see.
    if bool((qh.sum() + kh.sum()).isnan()):
        _defined(rules, o)
        return
    if not _GROUPED:
        kh, vh = (t.repeat_interleave(Hq // t.shape[1], 1) for t in (kh, vh))
    alone = triangle and mask is None
    if rules.scale == 0:  # by which that kernel multiplies the -inf of its triangle
        qh = torch.zeros_like(qh)
    out, lse = _kernel(qh, kh, vh, 0.0, alone, attn_mask=mask, scale=rules.scale or 1.0)
    out, lse = out.transpose(1, 2)[..., :Dv], lse.transpose(1, 2)  # (B, T, Hq, Dv), (B, T, Hq)
    if blind is not None and bool(blind.any()):
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
    if bool((lse.isnan() | (lse == torch.inf)).any()):
        _defined(rules, o)
        return
    if o.sink is not None:
        # A sink of -inf where nothing is seen: the difference is nan.
        out = out * (lse - o.sink).sigmoid().masked_fill(lse == -torch.inf, 0.0)[..., None]
    o.out.copy_(out)
    o.lse.copy_(lse)


def at_the_end(rules: Rules, o: Block) -> None:
    """The same of queries that are among the keys: those before the first key see nothing, causal or not."""
    before = max(0, o.q.shape[1] - o.k.shape[1])
    if before:
        nothing(o.out[:, :before], o.lse[:, :before])
        o = o._replace(q=o.q[:, before:], out=o.out[:, before:], lse=o.lse[:, before:])
    solve(rules, o)
