"""Host side of the decode kernels, for either kind of cache: plan, kernels, workspace, launch. Imports no cutlass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target

from . import compile, driver
from .decode_plan import Plan, bounded, score_factors
from .prefill_launch import given
from .splits import Workspace


def decoder(call: Call, target: Target, plan: Callable[..., Plan], keys: int, page: int = 0) -> Callable[..., None]:
    """The launch for caches of at most ``keys`` keys a sequence, in pages of ``page`` if that is not 0.

    It takes q, k, v, table (None without pages), kv_len, sink, kv_start, and a tuple of the other arguments: first the
    scales of q, k and v, last out and lse. ``plan`` is the architecture's.
    """
    dim, dim_v = call.dim["D"], call.dim["Dv"]
    window, sinks = bounded(call.arg.window), bounded(call.arg.sink_tokens)
    most = min(keys, window + sinks) if window >= 0 else keys
    heads, groups = call.dim["Hkv"], call.dim["B"] * call.dim["Hkv"]
    if call.dim["B"] == 0:
        return lambda *args: None
    sms, group = driver.sm_count(call.device), call.dim["Hq"] // heads
    codes, scales = call.dtype.itemsize == 1, given(call.arg)
    scaled, extra = any(scales), {"size": 1} if codes else {}

    def compiled(same: bool) -> tuple[Plan, Callable[..., None]]:
        p = plan(dim, dim_v, group, sms, most, groups, page, same=same, **extra)
        return p, compile.launcher(
            call, target, target.arch, kernel=f"torch_attnkit.cuda.{target.arch}.decode_kernel", trace=p.trace,
            dtype=short(call.dtype), **p.sizes, **({"scales": scales} if scaled else {}),
        )  # fmt: skip

    # A tensor that is both caches is read once; which it is can change from call to call.
    two = compiled(False)
    wide = two[0].trace != "trace"
    # Not of a cache without rows, whose every load by TMA is an illegal instruction.
    one = compiled(True) if wide and call.arg.k_cache.numel() > 0 else two
    floats, counters = (max(getattr(p, name) for p, _ in (one, two)) for name in ("floats", "counters"))
    workspace = Workspace(call.device, floats, counters)
    product, power = score_factors(dim, call.arg.scale, call.arg.softcap)
    no_pages = page > 0 and call.dim["Np"] == 0

    def launch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None, kv_len: torch.Tensor,
        sink: torch.Tensor | None, kv_start: torch.Tensor | None, rest: tuple[Any, ...],
    ) -> None:  # fmt: skip
        parts, count = workspace.get()
        if codes:
            q, k, v = (t.view(torch.uint8) for t in (q, k, v))
        if (k.data_ptr() | v.data_ptr()) & 15 or q.data_ptr() & 3:
            q, k, v = _aligned(q, k, v)
        p, fn = one if wide and k.data_ptr() == v.data_ptr() and k.stride() == v.stride() else two
        if no_pages:
            table = table[:, :0]  # so that no length, however wrong, makes a kernel look for keys
        has_sink, has_start = sink is not None, kv_start is not None
        tensors: tuple[Any, ...] = (
            q, k, v, table, kv_len, sink if has_sink else parts, kv_start if has_start else kv_len, rest[-2], rest[-1],
            parts, count, rest[:3] if scaled else None,
        )  # fmt: skip
        numbers = (product, power, window, sinks, int(has_sink), int(has_start))
        fn(tensors, (*numbers, p.chunks, p.by_group, p.beside, p.least, p.combiners), p.blocks)

    return launch


def _aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of those that start where the kernels do not read; the plan knows strides, but not where memory begins.

    Caches are read 16 bytes at a time, q 4. One tensor that is both caches remains one.
    """
    kept = torch.contiguous_format
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    k = k.clone(memory_format=kept) if k.data_ptr() & 15 else k
    v = k if same else v.clone(memory_format=kept) if v.data_ptr() & 15 else v
    return (q.clone(memory_format=kept) if q.data_ptr() & 3 else q), k, v
