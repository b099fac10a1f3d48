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
from .. import launch as static
from ..launch import nothing_attended, query_reader, reader, reading, scalars, section
from ..problem import Layout, Operands, PagedOperands, PagedProblem, Problem
from . import plan

Scales = tuple[torch.Tensor | None, ...]  # of q, k and v, (B, Hkv) each


# Dense batches and packed sequences.


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` in 16 bits: persistent CTAs draw their work tiles, or have them by rounds."""
    p = static.without_idle_window(problem)
    chosen = plan.dynamic(p, driver.sm_count(p.device))
    if chosen is None:
        return static.launcher(problem, target)
    run = compile.launcher(
        target, p.device, trace_packed_dynamic if p.packed else trace_dense_dynamic,
        **plan.dynamic_signature(p, chosen.tile),
    )  # fmt: skip
    workspace = _draws(p, chosen.dynamic, chosen.section)
    start = reading(lambda *arguments: run(*arguments, *workspace()), p, _scalars(p, 1))
    unread = torch.empty(p.heads, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys) == 0

    def launch(o: Operands) -> None:
        if nothing:
            return nothing_attended(o)
        start(o if o.sink is not None else o._replace(sink=unread))

    return launch


def wide(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """The same for heads whose output no warpgroup holds alone (``halves.py``)."""
    p, signature = problem, plan.signature(problem)
    run = compile.launcher(
        target, p.device, trace_packed_wide if p.packed else trace_dense_wide,
        **signature, **_lengths(p),
    )  # fmt: skip
    together = 1 if p.packed else section(p, plan.sharers(p, signature))
    start = reading(run, p, scalars(p.scores, together, driver.sm_count(p.device)))
    nothing = p.keys == 0 or (p.packed and p.batch == 0)

    def launch(operands: Operands) -> None:
        if nothing:
            nothing_attended(operands)
        elif operands.lse.numel():
            start(operands)

    return launch


def fp8(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """The same over E4M3: V is transposed, then attention runs.

    Queries at the end of a cache are a dense batch whose sequences' queries end where their keys do.
    """
    p = dataclasses.replace(problem, k=_by_token(problem.k), v=_by_token(problem.v)) if problem.cached else problem
    signature = plan.signature(p)
    lengths = _lengths(p) | ({} if p.packed else dict(ends_at_kv_len=p.cached))
    run = compile.launcher(
        target, p.device, trace_packed_fp8 if p.packed else trace_dense_fp8,
        **signature, **lengths,
    )  # fmt: skip
    transpose = compile.launcher(
        target, p.device, trace_transpose, varlen=p.packed,
        **plan.transpose_signature(signature), **lengths,
    )  # fmt: skip
    together = 1 if p.packed else section(p, plan.sharers(p, signature))
    numbers = scalars(p.scores, together, driver.sm_count(p.device))
    read_q, read_k, read_v = query_reader(p), reader(p.k, 1), reader(p.v, 1)
    shape = _transposed_shape(p, signature["tile_n"])
    scaled, nothing = any(p.scales), p.keys == 0 or (p.packed and p.batch == 0)

    def launch(o: Operands) -> None:
        if nothing:
            return nothing_attended(o)
        if o.lse.numel() == 0:
            return
        low, high = (o.cu_q, o.cu_k) if p.packed else (o.kv_start, o.kv_len)
        if p.cached:
            o = o._replace(k=o.k.transpose(1, 2), v=o.v.transpose(1, 2))
        q, k, v = read_q(o.q), read_k(o.k), read_v(o.v)
        values = torch.empty(shape, dtype=torch.uint8, device=p.device)  # (B, Hkv, Dv, S'); packed (Hkv, Dv, S')
        transpose((q, k, v, None, low, high, None), values, numbers)
        ins = (q, k, values, o.sink, low, high, o.scales if scaled else None)
        run(ins, (o.out, o.lse, None if p.normalize else o.row_sum), numbers)

    return launch


def _lengths(problem: Problem) -> dict[str, bool]:
    return {} if problem.packed else dict(kv_len=problem.kv_len, kv_start=problem.kv_start)


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
    """What solves ``problem`` in 16 bits, whose K and V are caches (B, Hkv, S, D)."""
    return _over_cache(problem, target, trace_cached, trace_cached_persistent)


def of_cache_fp8(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """The same over E4M3. Many queries are a dense batch."""
    p = problem
    empty = p.batch * p.queries * p.heads == 0
    if empty or plan.packs_heads(p, driver.sm_count(p.device)):
        return _over_cache(p, target, trace_cached_fp8, trace_cached_persistent_fp8)
    return _dense_over_cache(p, target)


def _over_cache(
    problem: Problem, target: Target, clusters: compile.Trace, persistent: compile.Trace
) -> Callable[[Operands], None]:
    p = problem
    if p.batch * p.queries * p.heads == 0:
        return lambda operands: None
    chosen = plan.of_cache(p, driver.sm_count(p.device))
    trace = persistent if chosen.persistent else clusters
    run = compile.launcher(target, p.device, trace, **plan.group_signature(p, chosen.tile))
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.dtype.itemsize) for t in (p.k, p.v))
    scales_of, numbers, workspace = _scale_reader(p), _scalars(p, chosen.ctas), _splits(p, chosen)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)

    def launch(o: Operands) -> None:
        if p.keys == 0:
            return nothing_attended(o)
        sink, start = unread if o.sink is None else o.sink, o.kv_len if o.kv_start is None else o.kv_start
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), o.kv_len, sink, start, scales_of(o.scales))
        run(ins, (o.out, o.lse), numbers, *workspace())

    return launch


def _dense_over_cache(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """Where all queries of a block see all keys, rows of queries before the first key are cleared behind attention."""
    p, attend = problem, fp8(problem, target)
    if p.causal:
        return attend
    clear = compile.launcher(target, p.device, trace_clear, dtype=short(p.out_dtype))

    def launch(o: Operands) -> None:
        attend(o)
        clear(o.out, o.lse, o.kv_len, p.keys)

    return launch


# Blocks of queries over pages.


def of_pages(problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """What solves ``problem`` in 16 bits."""
    return _over_pages(problem, target, trace_paged, trace_paged_persistent)


def of_pages_fp8(problem: PagedProblem, target: Target) -> Callable[[PagedOperands], None]:
    """The same over E4M3."""
    return _over_pages(problem, target, trace_paged_fp8, trace_paged_persistent_fp8)


def _over_pages(
    problem: PagedProblem, target: Target, clusters: compile.Trace, persistent: compile.Trace
) -> Callable[[PagedOperands], None]:
    p = problem.attention
    if p.queries * p.heads == 0:
        return lambda operands: None
    chosen = plan.of_pages(problem, driver.sm_count(p.device))
    trace = persistent if chosen.persistent else trace_paged_dynamic if chosen.dynamic else clusters
    run = compile.launcher(target, p.device, trace, **plan.pages_signature(problem, chosen))
    read_q, read_k, read_v = query_reader(p), *(reader(t, p.dtype.itemsize) for t in (p.k, p.v))
    scales_of, numbers = _scale_reader(p), _scalars(p, chosen.ctas)
    workspace = _draws(p, chosen.dynamic) if chosen.dynamic else _splits(p, chosen)
    unread = torch.empty(1, dtype=torch.float32, device=p.device)
    nothing = min(p.batch, p.keys, problem.pages) == 0

    def launch(o: PagedOperands) -> None:
        if nothing:
            o.out.zero_()
            o.lse.fill_(-torch.inf)
            return
        sink = unread if o.sink is None else o.sink
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), scales_of(o.scales), o.cu_q, o.table, o.kv_len, sink)
        run(ins, (o.out, o.lse), numbers, *workspace())

    return launch


# What kernels are given whose tiles a KV head's query heads share.


def _scale_reader(problem: Problem) -> Callable[[Scales], Scales | None]:
    """What a kernel is given of a call's scales: of E4M3 ones where it has none, else nothing."""
    p = problem
    if p.dtype.itemsize > 1:
        return lambda scales: None
    ones = torch.ones(p.batch, p.kv_heads, dtype=torch.float32, device=p.device)
    return lambda scales: tuple(ones if scale is None else scale for scale in scales)


def _scalars(problem: Problem, ctas: int) -> tuple[Any, ...]:
    """Their Scalars."""
    window, sinks = problem.scores.bounds if problem.scores.window >= 0 else (MOST, 0)
    flags = (int(on) for on in (problem.causal, problem.sink, problem.kv_start))
    return (*scalars(problem.scores, 0, 0)[:2], window, sinks, *flags, ctas)


def _splits(problem: Problem, chosen: plan.Plan) -> Callable[[], tuple[Any, ...]]:
    """What a launch of stream-K CTAs takes as its ``SplitWorkspace``; nothing where there are none."""
    p, tile, ctas = problem, chosen.tile, chosen.persistent
    if ctas == 0:
        return lambda: ()
    workspace = Workspace(p.device, 2 * ctas * plan.split_floats(tile.tile_m, p.dim_v), ctas)
    start = plan.start(tile, (p.dim + p.dim_v) * p.dtype.itemsize)
    return lambda: ((*workspace.get(), ctas, start),)


def _draws(problem: Problem, ctas: int, section: int = 0) -> Callable[[], tuple[Any, ...]]:
    """What a launch of ``ctas`` persistent CTAs takes that draw their work tiles (``dynamic_types.Draws``)."""
    workspace = Workspace(problem.device, 1, 1)
    return lambda: ((workspace.get()[1], ctas, section),)


# What is compiled.


def trace_dense_dynamic(arch: str, **signature: Any) -> compile.Traced:
    """``dynamic_kernel.py``."""
    from . import dynamic_kernel

    return dynamic_kernel.trace_dense_dynamic(arch, **signature)


def trace_packed_dynamic(arch: str, **signature: Any) -> compile.Traced:
    """``dynamic_kernel.py``."""
    from . import dynamic_kernel

    return dynamic_kernel.trace_packed_dynamic(arch, **signature)


def trace_dense_wide(arch: str, **signature: Any) -> compile.Traced:
    """``halves_kernel.py``."""
    from . import halves_kernel

    return halves_kernel.trace_dense(arch, **signature)


def trace_packed_wide(arch: str, **signature: Any) -> compile.Traced:
    """``halves_kernel.py``."""
    from . import halves_kernel

    return halves_kernel.trace_packed(arch, **signature)


def trace_dense_fp8(arch: str, **signature: Any) -> compile.Traced:
    """``codes_kernel.py``."""
    from . import codes_kernel

    return codes_kernel.trace_dense(arch, **signature)


def trace_packed_fp8(arch: str, **signature: Any) -> compile.Traced:
    """``codes_kernel.py``."""
    from . import codes_kernel

    return codes_kernel.trace_packed(arch, **signature)


def trace_transpose(arch: str, **signature: Any) -> compile.Traced:
    """``codes_kernel.py``."""
    from . import codes_kernel

    return codes_kernel.trace_transpose(arch, **signature)


def trace_cached(arch: str, **signature: Any) -> compile.Traced:
    """``cached_kernel.py``."""
    from . import cached_kernel

    return cached_kernel.trace_cached(arch, **signature)


def trace_cached_persistent(arch: str, **signature: Any) -> compile.Traced:
    """``cached_kernel.py``."""
    from . import cached_kernel

    return cached_kernel.trace_cached_persistent(arch, **signature)


def trace_cached_fp8(arch: str, **signature: Any) -> compile.Traced:
    """``multi_codes_kernel.py``."""
    from . import multi_codes_kernel

    return multi_codes_kernel.trace_cached(arch, **signature)


def trace_cached_persistent_fp8(arch: str, **signature: Any) -> compile.Traced:
    """``multi_codes_kernel.py``."""
    from . import multi_codes_kernel

    return multi_codes_kernel.trace_cached_persistent(arch, **signature)


def trace_clear(arch: str, **signature: Any) -> compile.Traced:
    """``unplaced.py``."""
    from . import unplaced

    return unplaced.trace(arch, **signature)


def trace_paged(arch: str, **signature: Any) -> compile.Traced:
    """``paged_kernel.py``."""
    from . import paged_kernel

    return paged_kernel.trace_paged(arch, **signature)


def trace_paged_persistent(arch: str, **signature: Any) -> compile.Traced:
    """``paged_kernel.py``."""
    from . import paged_kernel

    return paged_kernel.trace_paged_persistent(arch, **signature)


def trace_paged_dynamic(arch: str, **signature: Any) -> compile.Traced:
    """``paged_kernel.py``."""
    from . import paged_kernel

    return paged_kernel.trace_paged_dynamic(arch, **signature)


def trace_paged_fp8(arch: str, **signature: Any) -> compile.Traced:
    """``paged_codes_kernel.py``."""
    from . import paged_codes_kernel

    return paged_codes_kernel.trace_paged(arch, **signature)


def trace_paged_persistent_fp8(arch: str, **signature: Any) -> compile.Traced:
    """``paged_codes_kernel.py``."""
    from . import paged_codes_kernel

    return paged_codes_kernel.trace_paged_persistent(arch, **signature)
