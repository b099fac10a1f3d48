"""Attention and experts over several processes, by the collectives of ``torch.distributed``.

What a call of one op shares among processes by heads, sequences or tokens, ``torch.distributed.tensor`` does from the
table's rules (``torch_attnkit/sharding.py``). Here is what takes several calls, or other arguments in each process:

cp_prefill   causal attention of a sequence whose tokens are spread over processes (context parallel)
cp_decode    a decode step over a cache whose keys are
ep_moe       experts that are (expert parallel)

All processes of ``group`` (None: the default group) call them together, with tensors of the same shapes, dtypes and
scalars unless a function says otherwise. Inputs are local tensors, not DTensors; outputs too. On CUDA use the backend
"nccl", on a CPU "gloo". No gradient flows back: where one is asked for, NotImplementedError is raised before anything
is sent.

Sources: Llama 3 (arXiv 2407.21783), whose context parallelism gathers K and V; Flash-Decoding (2023); GShard
(arXiv 2006.16668).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torch_attnkit.core import UnsupportedError

ops = torch.ops.attnkit
Group = dist.ProcessGroup | None
TOKENS = ("replicated", "own")
_ALIGNED = 16  # bytes: enough for any dtype, and what kernels read at once
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def head_tail(x: torch.Tensor, dim: int = 1, *, group: Group = None) -> torch.Tensor:
    """This process's part of the tokens on axis ``dim`` of ``x``, in the order that cp_prefill wants: of 2 P equal runs
    the one of its rank and, counted from the end, again the one of its rank. Causal work is equal by that.

    ``x`` (..., T, ...) to (..., T / P, ...), a copy. Raises ValueError unless T is a multiple of 2 P.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if x.shape[dim] % (2 * world):
        raise ValueError(
            f"head_tail: axis {dim} of x has {x.shape[dim]} tokens, accepted: a multiple of {2 * world}, twice the"
            f" number of processes"
        )
    runs = x.chunk(2 * world, dim)
    return torch.cat((runs[rank], runs[2 * world - 1 - rank]), dim)


def from_head_tail(x: torch.Tensor, dim: int = 1, *, group: Group = None) -> torch.Tensor:
    """What head_tail took apart, whole in every process: ``x`` (..., T / P, ...) to (..., T, ...).

    Raises ValueError unless T / P is even.
    """
    if x.shape[dim] % 2:
        raise ValueError(f"from_head_tail: axis {dim} of x has {x.shape[dim]} tokens, accepted: an even number")
    parts = _gathered(x, group)  # (P, *x.shape)
    heads, tails = parts.chunk(2, dim + 1 if dim >= 0 else dim)
    return torch.cat((*heads.unbind(0), *tails.flip(0).unbind(0)), dim)


def cp_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of tokens that are spread over the processes as ``head_tail`` spreads them.

    q (B, T / P, Hq, D), k (B, T / P, Hkv, D), v (B, T / P, Hkv, Dv): this process's tokens. sink (Hq), kv_len and
    kv_start (B) of the whole sequences, the same in every process, and the scalars are those of flash_attention, which
    runs twice: on the keys up to the end of each of the two runs of tokens. K and V are gathered, so that memory for
    all keys of one layer has to be there; nothing else is sent.

    Returns out (B, T / P, Hq, Dv) in q's dtype and lse (B, T / P, Hq) in float32, of this process's tokens.

    Raises ValueError for an odd number of tokens, and what flash_attention raises.
    """
    _refuse_gradient("cp_prefill", q=q, k=k, v=v, sink=sink)
    if q.shape[1] % 2 or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"cp_prefill: q has {q.shape[1]} and k {k.shape[1]} tokens, accepted: as many of both, an even number, as"
            " head_tail gives them"
        )
    rank, world, run = dist.get_rank(group), dist.get_world_size(group), q.shape[1] // 2
    keys, values = (from_head_tail(x, group=group) for x in (k, v))  # (B, T, Hkv, D), (B, T, Hkv, Dv)
    found = []
    for half, piece in enumerate((rank, 2 * world - 1 - rank)):
        seen = (piece + 1) * run  # keys up to the end of this run of tokens: the last query sees the last of them
        length, start = (None if n is None else n.clamp(max=seen) for n in (kv_len, kv_start))
        found.append(
            ops.flash_attention(
                q[:, half * run : (half + 1) * run], keys[:, :seen], values[:, :seen], sink, length, start,
                scale=scale, causal=True, window=window, sink_tokens=sink_tokens, softcap=softcap,
            )[:2]
        )  # fmt: skip
    out, lse = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return out, lse


def cp_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_len: torch.Tensor,
    sink: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = -1,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per sequence over a cache whose keys are spread over the processes in runs of equal length.

    q (B, Hq, D), sink (Hq), kv_len and kv_start (B) in int32 are the same in every process; kv_len and kv_start count
    the keys of the whole sequences, up to P * S. k_cache (B, Hkv, S, D) and v_cache (B, Hkv, S, Dv) hold the keys
    [rank * S, (rank + 1) * S) of each. Scalars are those of sdpa_decode. Each process attends what lies with it; Dv + 1
    numbers a head are gathered, and merge_partials joins them, with the sinks. A window becomes a first key; first
    tokens that are kept before it (``sink_tokens``) are a second call of sdpa_decode.

    Returns out (B, Hq, Dv) in q's dtype and lse (B, Hq) in float32, the same in every process; the weights of the parts
    come from lse, so that float64 is as exact as float32 is. Raises what sdpa_decode raises; lengths are not looked at,
    they are on the device.
    """
    _refuse_gradient("cp_decode", q=q, k_cache=k_cache, v_cache=v_cache, sink=sink)
    size = k_cache.shape[2]
    before = dist.get_rank(group) * size  # keys that lie with processes before this one

    def here(n: torch.Tensor) -> torch.Tensor:
        """A place among the keys of a sequence, counted among those that lie here."""
        return (n - before).clamp(0, size).to(torch.int32)  # (B,)

    def attended(start: torch.Tensor | None, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = None if start is None else here(start)
        found: tuple[torch.Tensor, torch.Tensor] = ops.sdpa_decode(
            q, k_cache, v_cache, here(end), None, first, scale=scale, softcap=softcap
        )
        return found

    start, parts = kv_start, []
    if window >= 0:
        first = torch.zeros_like(kv_len) if kv_start is None else kv_start
        start = torch.maximum(first, kv_len - min(window, 2**30))
        if sink_tokens > 0:  # those that lie in the window are attended there
            end = torch.minimum(first + min(sink_tokens, 2**30), start)
            parts.append(attended(first, torch.minimum(end, kv_len)))
    parts.append(attended(start, kv_len))
    # (1 or 2, B, Hq, Dv), (1 or 2, B, Hq); one part is not copied: a launch is much of what sharing a step costs
    out, lse = (torch.stack(each) if len(each) > 1 else each[0][None] for each in zip(*parts, strict=True))
    out, lse = _all_gathered(out, lse, group=group)  # (P, 1 or 2, ...)
    merged: tuple[torch.Tensor, torch.Tensor] = ops.merge_partials(out.flatten(0, 1), lse.flatten(0, 1), sink)
    return merged


def ep_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *others: torch.Tensor | None,
    tokens: str = "replicated",
    group: Group = None,
    **scalars: Any,
) -> torch.Tensor:
    """fp4_moe with the experts spread over the processes: this one has the experts [rank * E, (rank + 1) * E).

    x (Tq, N), weights and indices (Tq, K): tokens, and their experts among all P * E, -1 for none. w13 (E, M2, N/2),
    its scales and all arguments behind it are fp4_moe's, of this process's experts; x_global and h_global are the same
    everywhere.

    ``tokens`` "replicated": every process has all tokens and adds up what its experts make of them; the sums of the
    processes are added by an all-reduce in x's dtype. For decode steps: nothing waits for the device, and CUDA graphs
    can be captured. "own": every process has tokens of its own, any number. Each token is sent once to every process
    that has one of its experts, and what comes back is added in float32, in the order of ranks. For prefill: how much
    goes where is a number that the host has to wait for, and processes whose experts are asked for most take longest.

    Returns (Tq, N) in x's dtype. Raises ValueError for another word for ``tokens``, and what fp4_moe raises.
    """
    _refuse_gradient("ep_moe", x=x, weights=weights)
    if tokens not in TOKENS:
        raise ValueError(f"ep_moe: tokens is {tokens!r}, accepted: {', '.join(map(repr, TOKENS))}")
    experts = (w13, w13_scale, w2, w2_scale, *others)
    first, count = dist.get_rank(group) * w13.shape[0], w13.shape[0]

    def local_experts(rows: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        here = (indices >= first) & (indices < first + count)
        local: torch.Tensor = ops.fp4_moe(rows, weights, torch.where(here, indices - first, -1), *experts, **scalars)
        return local  # (rows, N)

    if tokens == "replicated":
        out = local_experts(x, weights, indices)
        dist.all_reduce(out, group=group)
        return out
    world = dist.get_world_size(group)
    rank = torch.arange(world, device=x.device)[:, None, None]
    wanted = ((indices >= 0) & (indices // count == rank)).any(-1)  # (P, Tq) the tokens that go to each process
    sent = wanted.sum(1)  # (P,)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    send_counts, receive_counts = torch.stack((sent, received)).tolist()  # the one wait for the device
    token = torch.nonzero_static(wanted, size=sum(send_counts))[:, 1]  # (sent,) in the order of ranks
    rows = _exchanged(x[token], send_counts, receive_counts, group)  # (received, N)
    # Weights and experts of a token are few bytes, and travel together.
    routes = torch.cat([t.contiguous().view(torch.uint8) for t in (weights, indices)], 1)  # (Tq, bytes)
    ends = [weights.shape[1] * weights.itemsize, indices.shape[1] * indices.itemsize]
    parts = _exchanged(routes[token], send_counts, receive_counts, group).split(ends, 1)
    given = [part.contiguous().view(t.dtype) for part, t in zip(parts, (weights, indices), strict=True)]
    made = _exchanged(local_experts(rows, *given), receive_counts, send_counts, group)  # (sent, N)
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for rows, part in zip(token.split(send_counts), made.split(send_counts), strict=True):
        out.index_add_(0, rows, part.to(out.dtype))  # a token is there once: the order of sums is that of ranks
    return out.to(x.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Collectives move bytes: not every backend knows every dtype."""
    return x.contiguous().view(-1).view(torch.uint8)


def _gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x`` of all processes, (P, *x.shape)."""
    sent = _bytes(x)
    world = dist.get_world_size(group)
    all_bytes = sent.new_empty(world * sent.numel())
    _all_gather(all_bytes, sent, group=group)
    return all_bytes.view(x.dtype).view(world, *x.shape)


def _all_gathered(*tensors: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """``_gathered`` of several tensors by one collective, whose latency is what a decode step pays for. What comes back
    are views of what was gathered, dense but for the axis of processes."""
    flat = [_bytes(t) for t in tensors]
    flat = [F.pad(b, (0, -b.numel() % _ALIGNED)) if b.numel() % _ALIGNED else b for b in flat]
    all_bytes = _gathered(torch.cat(flat), group)  # (P, bytes)
    starts = itertools.accumulate((b.numel() for b in flat), initial=0)
    return [
        all_bytes.view(t.dtype).narrow(1, start // t.itemsize, t.numel()).view(-1, *t.shape)
        if t.numel()
        else t.new_empty(len(all_bytes), *t.shape)
        for t, start in zip(tensors, starts, strict=False)
    ]


def _exchanged(x: torch.Tensor, send_counts: list[int], receive_counts: list[int], group: Group) -> torch.Tensor:
    """Rows ``x`` (sent, ...), ``send_counts`` to each process, for ``receive_counts`` from each: (received, ...)."""
    row = math.prod(x.shape[1:]) * x.itemsize  # bytes
    received = torch.empty(sum(receive_counts) * row, dtype=torch.uint8, device=x.device)
    output, given = ([n * row for n in counts] for counts in (receive_counts, send_counts))
    dist.all_to_all_single(received, _bytes(x), output, given, group=group)
    return received.view(x.dtype).view(-1, *x.shape[1:])


def _refuse_gradient(name: str, **tensors: torch.Tensor | None) -> None:
    """A collective would drop the gradient in silence."""
    for argument, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: {argument} requires a gradient, but {name} has no backward; call it under torch.no_grad()"
                " or torch.inference_mode()"
            )
        if _is_dtensor(tensor):
            raise UnsupportedError(
                f"{name}: {argument} is a DTensor, accepted: its local tensor, {argument}.to_local()"
            )


def _is_dtensor(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "to_local")
