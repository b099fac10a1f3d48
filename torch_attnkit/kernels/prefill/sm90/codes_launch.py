"""Host side of E4M3 on Hopper: V is transposed, then attention runs.

Queries at the end of a cache are a dense batch whose sequences' queries end where their keys do. Few of them leave most
rows of a work tile empty (``multi.py``, for 16 bits, fills them with the heads of a group).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..launch import nothing_attended, query_reader, reader, scalars, section
from ..problem import Layout, Operands, Problem
from . import codes_plan, plan

_MODULE = "torch_attnkit.kernels.prefill.sm90.codes_kernel"


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` over E4M3: dense batches, packed sequences, or queries at the end of a cache."""
    p = dataclasses.replace(problem, k=_by_token(problem.k), v=_by_token(problem.v)) if problem.cached else problem
    signature = codes_plan.signature(p)
    lengths = {} if p.packed else dict(kv_len=p.kv_len, kv_start=p.kv_start, ends_at_kv_len=p.cached)
    run = compile.launcher(
        target, p.device, _MODULE, trace="trace_packed" if p.packed else "trace_dense", **signature, **lengths
    )
    transpose = compile.launcher(
        target, p.device, _MODULE,
        trace="trace_transpose", varlen=p.packed, **codes_plan.transpose_signature(signature), **lengths,
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


def _by_token(cache: Layout) -> Layout:
    """The layout of a cache (B, Hkv, S, D) with its axes as (B, S, Hkv, D)."""
    return Layout(*((a[0], a[2], a[1], a[3]) for a in cache))


def _transposed_shape(problem: Problem, keys: int) -> tuple[int, ...]:
    """Of V transposed, where a sequence's keys begin and end at multiples of ``keys``."""
    p = problem
    if p.packed:
        return p.kv_heads, p.dim_v, (p.keys // keys + p.batch + 1) * keys
    return p.batch, p.kv_heads, p.dim_v, -(-p.keys // keys) * keys
