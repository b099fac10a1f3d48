"""Host side of the cache kernels on NVIDIA GPUs: write, gather, write into pages, and norm, RoPE and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.kernels.fp4.plan import reciprocal

from . import plan
from .problem import (
    Operands,
    PagedOperands,
    PagedProblem,
    Problem,
    RopeOperands,
    RopeProblem,
    without_overlap,
)


def writer(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What writes the rows of ``problem`` to their slots on ``target``. Rows that overlap the cache are copied first,
    so that none is overwritten before it is read."""
    p, run = problem, _launcher(problem, target, gather=False)
    span = (max(p.rows - 1, 0) * p.step + p.row.head_dim) * p.dtype.itemsize  # bytes
    cache_span = ((p.slots - 1) * p.cache_step + p.row.size) * p.cache_dtype.itemsize

    def launch(operands: Operands) -> None:
        o = operands
        run(o._replace(dense=_apart(o.dense, span, o.cache, cache_span)))

    return launch


def gatherer(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What gathers the rows of ``problem`` from their slots on ``target``."""
    return _launcher(problem, target, gather=True)


def _launcher(p: Problem, target: Target, *, gather: bool) -> Callable[[Operands], None]:
    if p.rows * p.row.head_dim == 0 or (p.slots == 0 and not gather):
        return lambda operands: None
    sms = driver.sm_count(p.device)

    def compiled(width: int, align: int) -> Callable[..., None]:
        dtypes = tuple(short(d) for d in (p.dtype, p.cache_dtype, p.slot_dtype))
        signature: dict[str, Any] = dict(row=astuple(p.row), dtypes=dtypes)
        if p.row.plain:
            config = plan.plain(width, p.row.head_dim, p.rows, sms)
            run = compile.launcher(
                target,
                p.device,
                trace_plain,
                gather=gather,
                config=astuple(config),
                **signature,
            )
            return lambda dense, cache, slot, global_scale: run(dense, cache, slot)
        config = plan.encoded(p.row, width, align, p.rows, sms)
        write, read = trace_write, trace_gather
        signature |= dict(global_scale=p.global_scale, align=align, config=astuple(config))
        return compile.launcher(target, p.device, read if gather else write, **signature)

    width, align = plan.width(p), plan.align(p)
    wide = compiled(width, align)
    # The bits of no vector's address.
    odd = plan.vector_bytes(width, p.dtype) - 1
    cache_odd = (plan.vector_bytes(width, p.cache_dtype) if p.row.plain else align) - 1
    narrow: list[Callable[..., None]] = []

    def launch(operands: Operands) -> None:
        run = wide
        if operands.dense.data_ptr() & odd | operands.cache.data_ptr() & cache_odd:
            if not narrow:
                narrow.append(compiled(1, 1))
            run = narrow[0]
        run(*operands)

    return launch


def paged_writer(problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """What writes the tokens of ``problem`` to their slots on ``target``."""
    p = problem
    if p.empty:
        return lambda operands: None

    def compiled(width: int) -> Callable[..., None]:
        vectors = -(-p.heads * max(side.dim for side in p.sides) // width)
        return compile.launcher(
            target,
            p.device,
            trace_pages,
            heads=p.heads,
            dims=tuple(side.dim for side in p.sides),
            dtypes=tuple(short(d) for d in (p.dtype, p.cache_dtype, p.slot_dtype)),
            scaled=tuple(side.scaled for side in p.sides),
            width=width,
            threads=min(plan.MOST_PAGED_THREADS, -(-vectors // 32) * 32),
        )

    width = plan.paged_width(p)
    wide, narrow = compiled(width), list[Callable[..., None]]()
    odd, cache_odd = width * p.dtype.itemsize - 1, width * p.cache_dtype.itemsize - 1  # the bits of no vector's address

    def launch(operands: PagedOperands) -> None:
        o, run = without_overlap(operands), wide
        if (o.key.data_ptr() | o.value.data_ptr()) & odd or (o.k_cache.data_ptr() | o.v_cache.data_ptr()) & cache_odd:
            if not narrow:
                narrow.append(compiled(1))
            run = narrow[0]
        run(*o)

    return launch


def rope_launcher(problem: RopeProblem, target: Target) -> Callable[[RopeOperands], None]:
    """What solves ``problem`` on ``target``. Heads and keys that overlap the cache are copied first."""
    p, k = problem, problem.keys
    if k.rows == 0 or (p.heads == 0 and k.slots == 0):
        return lambda operands: None
    sms = driver.sm_count(k.device)
    config = plan.rope(p, sms)
    odds = tuple(align - 1 for align in plan.alignments(p, config))
    groups = plan.head_groups(p, config.heads)
    where = (groups, reciprocal(max(groups, 1)))

    def compiled(c: plan.RopeConfig, align: int) -> Callable[..., None]:
        return compile.launcher(
            target,
            k.device,
            trace_rope,
            row=astuple(k.row),
            pairs=p.pairs,
            dtypes=tuple(short(d) for d in (k.dtype, k.cache_dtype, k.slot_dtype, p.angle_dtype)),
            global_scale=k.global_scale,
            align=align,
            config=astuple(c),
        )

    wide = compiled(config, odds[2] + 1)
    narrow: list[Callable[..., None]] = []
    head = (max(k.rows - 1, 0) * p.q[0] + max(p.heads - 1, 0) * p.q[1] + k.row.head_dim) * k.dtype.itemsize  # bytes
    key = (max(k.rows - 1, 0) * k.step + k.row.head_dim) * k.dtype.itemsize
    cached = (max(k.slots - 1, 0) * k.cache_step + k.row.size) * k.cache_dtype.itemsize

    def launch(o: RopeOperands) -> None:
        o = o._replace(q=_apart(o.q, head, o.cache, cached), kv=_apart(o.kv, key, o.cache, cached))
        run, angles = wide, o.cos.data_ptr() | o.sin.data_ptr()
        addresses = o.q.data_ptr(), o.kv.data_ptr(), o.cache.data_ptr(), angles
        if any(address & odd for address, odd in zip(addresses, odds, strict=True)):
            if not narrow:
                narrow.append(compiled(plan.RopeConfig(config.warps, config.heads), 1))
            run = narrow[0]
        *tensors, eps = o
        run(*tensors, where, eps)

    return launch


def _apart(tensor: torch.Tensor, span: int, cache: torch.Tensor, cached: int) -> torch.Tensor:
    """``tensor``, which spans ``span`` bytes, or a copy where it may overlap the cache."""
    ahead = cache.data_ptr() - tensor.data_ptr()
    return tensor.clone() if -cached < ahead < span else tensor


def trace_plain(arch: str, **signature: Any) -> compile.Traced:
    """Dense rows, both ways."""
    from . import kernel

    return kernel.trace_plain(arch, **signature)


def trace_write(arch: str, **signature: Any) -> compile.Traced:
    """Rows to an encoded format."""
    from . import kernel

    return kernel.trace_write(arch, **signature)


def trace_gather(arch: str, **signature: Any) -> compile.Traced:
    """Rows from an encoded format."""
    from . import kernel

    return kernel.trace_gather(arch, **signature)


def trace_pages(arch: str, **signature: Any) -> compile.Traced:
    """Keys and values to pages."""
    from . import paged_kernel

    return paged_kernel.trace(arch, **signature)


def trace_rope(arch: str, **signature: Any) -> compile.Traced:
    """Heads normalised and rotated, keys rotated and written."""
    from . import rope_kernel

    return rope_kernel.trace(arch, **signature)
