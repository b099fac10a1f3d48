"""Host side of the prefill kernels on Hopper, in 16 bits and in E4M3.

They take dense batches, packed sequences, queries at the end of a cache, and blocks of queries over pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.cuda.workspace import Workspace

from ...scores import MOST
from .. import launch as family
from ..launch import nothing_attended, query_reader, reader, reading, static
from ..problem import Layout, Operands, PagedOperands, PagedProblem, Problem
from . import plan
from .tiles import split_floats

Scales = tuple[torch.Tensor | None, ...]  # of q, k and v, (B, Hkv) each


# Dense batches and packed sequences.


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` in 16 bits, by the dynamic persistent scheduler or the static one."""
    p = family.without_idle_window(problem)
    chosen = plan.dynamic(p, driver.sm_count(p.device))
    if chosen is None:
        signature = plan.signature(p)
        return static(p, target, trace, signature, plan.sharers(p, signature))
    run = compile.launcher(
        target, p.device, trace, **plan.group_signature(p, chosen, "packed" if p.packed else "dense")
    )  # fmt: skip
    workspace = _workspace(p, chosen)
    start = reading(lambda *arguments: run(*arguments, *workspace()), p, group_scalars(p, 1))
    unread = torch.empty(p.heads, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys) == 0

    def launch(o: Operands) -> None:
        if nothing:
            return nothing_attended(o)
        start(o if o.sink is not None else o._replace(sink=unread))

    return launch


def hdim512(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """The same for heads whose output no warpgroup holds alone."""
    signature = plan.signature(problem)
    attend = static(problem, target, trace_hdim512, signature, plan.sharers(problem, signature))
    return lambda o: nothing_attended(o) if family.has_no_keys(problem) else attend(o)


def fp8(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """The same over E4M3: V is transposed, then attention runs.

    Queries at the end of a cache are a dense batch whose sequences' queries end where their keys do.
    """
    p = dataclasses.replace(problem, k=_by_token(problem.k), v=_by_token(problem.v)) if problem.cached else problem
    signature = plan.signature(p)
    run = compile.launcher(target, p.device, trace_fp8, **signature)
    transpose = compile.launcher(target, p.device, trace_transpose_v, **plan.transpose_signature(p, signature))
    scalars = family.static_scalars(p, plan.sharers(p, signature))
    read_q, read_k, read_v = query_reader(p), reader(p.k, 1), reader(p.v, 1)
    shape = _transposed_shape(p, signature["tile_n"])
    scaled = any(p.scales)

    def launch(o: Operands) -> None:
        if family.has_no_keys(p):
            return nothing_attended(o)
        if o.lse.numel() == 0:
            return
        low, high = (o.cu_q, o.cu_k) if p.packed else (o.kv_start, o.kv_len)
        if p.cached:
            o = o._replace(k=o.k.transpose(1, 2), v=o.v.transpose(1, 2))
        q, k, v = read_q(o.q), read_k(o.k), read_v(o.v)
        values = torch.empty(shape, dtype=torch.uint8, device=p.device)  # (B, Hkv, Dv, S'); packed (Hkv, Dv, S')
        transpose((q, k, v, None, low, high, None), values, scalars)
        ins = (q, k, values, o.sink, low, high, o.scales if scaled else None)
        run(ins, (o.out, o.lse, None if p.normalize else o.row_sum), scalars)

    return launch


def _by_token(cache: Layout) -> Layout:
    """The layout of a cache (B, Hkv, S, D) with its axes as (B, S, Hkv, D)."""
    return Layout(*((a[0], a[2], a[1], a[3]) for a in cache))


def _transposed_shape(problem: Problem, keys: int) -> tuple[int, ...]:
    """Of V transposed, where a sequence's keys begin and end at multiples of ``keys``."""
    p = problem
    if p.packed:
        return p.kv_heads, p.dim_v, (p.keys // keys + p.batch + 1) * keys
    return p.batch, p.kv_heads, p.dim_v, -(-p.keys // keys) * keys


# Queries at the end of a cache.


def of_cache(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, whose K and V are caches (B, Hkv, S, D), by tiles that a KV head's query heads share."""
    p = problem
    if p.batch * p.queries * p.heads == 0:
        return lambda operands: None
    chosen = plan.of_cache(p, driver.sm_count(p.device))
    run = compile.launcher(target, p.device, trace_cached, **plan.group_signature(p, chosen, "cache"))
    start = group_start(run, p, group_scalars(p, chosen.ctas), _workspace(p, chosen))

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return nothing_attended(o)
        kv_start = o.kv_len if o.kv_start is None else o.kv_start
        start(o, lambda q, k, v, sink, scales: (q, k, v, o.kv_len, sink, kv_start, scales))

    return launch


def of_cache_fp8(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """The same over E4M3. Many queries are a dense batch."""
    p = problem
    if p.batch * p.queries * p.heads == 0 or plan.packs_heads(p, driver.sm_count(p.device)):
        return of_cache(p, target)
    attend = fp8(p, target)
    if p.causal:
        return attend
    # Where all queries of a block see all keys, rows of queries before the first key are cleared behind attention.
    zero_fill = compile.launcher(target, p.device, trace_zero_fill, dtype=short(p.out_dtype))

    def launch(o: Operands) -> None:
        attend(o)
        zero_fill(o.out, o.lse, o.kv_len, p.keys)

    return launch


# Blocks of queries over pages.


def of_pages(problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """What solves ``problem``, whose K and V are pages."""
    p = problem.attention
    if p.queries * p.heads == 0:
        return lambda operands: None
    chosen = plan.of_pages(problem, driver.sm_count(p.device))
    run = compile.launcher(target, p.device, trace_paged, **plan.pages_signature(problem, chosen))
    start = group_start(run, p, group_scalars(p, chosen.ctas), _workspace(p, chosen))
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: PagedOperands) -> None:
        if nothing:
            return nothing_attended(o)
        start(o, lambda q, k, v, sink, scales: (q, k, v, scales, o.cu_q, o.table, o.kv_len, sink))

    return launch


# What kernels are given whose tiles a KV head's query heads share.


def group_start(
    run: Callable[..., None], problem: Problem, scalars: tuple[Any, ...],
    workspace: Callable[[], tuple[Any, ...]] = tuple,
) -> Callable[..., None]:  # fmt: skip
    """What runs a kernel on operands, and on its inputs as a function orders them; ``workspace`` gives what it is given
    behind its scalars."""
    p = problem
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.kv_itemsize) for t in (p.k, p.v))
    scales_of = _scale_reader(p)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)

    def start(o: Operands | PagedOperands, order: Callable[..., tuple[Any, ...]]) -> None:
        sink = unread if o.sink is None else o.sink
        ins = order(read_q(o.q), read_k(o.k), read_v(o.v), sink, scales_of(o.scales))
        run(ins, (o.out, o.lse), scalars, *workspace())

    return start


def _scale_reader(problem: Problem) -> Callable[[Scales], Scales | None]:
    """What a kernel is given of a call's scales: where K and V are E4M3 ones where it has none, else nothing."""
    p = problem
    if p.kv_itemsize > 1:
        return lambda scales: None
    ones = torch.ones(p.batch, p.kv_heads, dtype=torch.float32, device=p.device)
    return lambda scales: tuple(ones if scale is None else scale for scale in scales)


def group_scalars(problem: Problem, last: int) -> tuple[Any, ...]:
    """Their GroupScalars, whose last entry is ``last``."""
    window, sinks = problem.scores.bounds if problem.scores.window >= 0 else (MOST, 0)
    flags = (int(on) for on in (problem.causal, problem.sink, problem.kv_start))
    return (*family.scalars(problem.scores, 0, 0)[:2], window, sinks, *flags, last)


def _workspace(problem: Problem, chosen: plan.Plan) -> Callable[[], tuple[Any, ...]]:
    """What a launch takes as its ``SplitWorkspace`` or ``TileCounter``; nothing where it has none."""
    p, tile, ctas = problem, chosen.tile, chosen.stream_k
    if chosen.dynamic:
        counter = Workspace(p.device, 1, 1)
        return lambda: ((counter.get()[1], chosen.dynamic, chosen.section),)
    if ctas:
        splits = Workspace(p.device, 2 * ctas * split_floats(tile.tile_m, p.dim_v), ctas)
        start = plan.start(tile, (p.dim + p.dim_v) * p.kv_itemsize)
        return lambda: ((*splits.get(), ctas, start),)
    return lambda: ()


# What is compiled: a function for each set of modules that a call's kernel may need.


def trace(arch: str, **signature: Any) -> compile.Traced:
    """Dense batches and packed sequences in 16 bits."""
    from . import kernel

    return kernel.trace(kernel.Parts(), **signature)


def trace_hdim512(arch: str, **signature: Any) -> compile.Traced:
    """The same for heads of 512."""
    from . import kernel, mainloop_hdim512

    parts = kernel.Parts(mainloop_hdim512.MainloopHdim512, mainloop_hdim512.EpilogueHdim512)
    return kernel.trace(parts, **signature)


def trace_fp8(arch: str, **signature: Any) -> compile.Traced:
    """The same over E4M3, with V transposed by ``trace_transpose_v``'s kernel."""
    from . import kernel, mainloop_fp8

    return kernel.trace(kernel.Parts(of_fp8=(mainloop_fp8.MainloopFp8, None)), **signature)


def trace_cached(arch: str, **signature: Any) -> compile.Traced:
    """Queries at the end of a cache."""
    from . import kernel, mainloop_fp8, split_kv_scheduler, transpose_v

    of_fp8 = mainloop_fp8.MainloopFp8, transpose_v.TransposeV
    return kernel.trace(kernel.Parts(split_kv=split_kv_scheduler, of_fp8=of_fp8), **signature)


def trace_paged(arch: str, **signature: Any) -> compile.Traced:
    """Blocks of queries over pages."""
    from . import kernel, load_paged, mainloop_fp8, split_kv_scheduler, transpose_v, widen

    of_fp8 = mainloop_fp8.MainloopFp8, transpose_v.TransposeV
    parts = kernel.Parts(
        loader=load_paged.PagedLoader, split_kv=split_kv_scheduler, of_fp8=of_fp8, widen=widen.WidenKV
    )  # fmt: skip
    return kernel.trace(parts, **signature)


def trace_transpose_v(arch: str, **signature: Any) -> compile.Traced:
    """V of E4M3 ahead of ``trace_fp8``'s kernel."""
    from . import transpose_v

    return transpose_v.trace(**signature)


def trace_zero_fill(arch: str, **signature: Any) -> compile.Traced:
    """Rows of queries before a cache's first key, behind ``trace_fp8``'s kernel."""
    from . import zero_fill

    return zero_fill.trace(**signature)
