"""Host side of the kernel that norms, rotates and writes, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.kernels.fp4.plan import reciprocal

from . import rope_plan
from .rope_problem import RopeOperands, RopeProblem


def launcher(problem: RopeProblem, target: Target) -> Callable[[RopeOperands], None]:
    """What solves ``problem`` on ``target``. Heads and keys that share memory with the cache are copied first, so that
    no row is overwritten before it is read."""
    p, k = problem, problem.keys
    if k.rows == 0 or (p.heads == 0 and k.slots == 0):
        return lambda operands: None
    sms = driver.sm_count(k.device)
    config = rope_plan.wide(p, sms)
    odds = tuple(align - 1 for align in rope_plan.alignments(p, config))
    groups = rope_plan.groups(p, config.heads)
    where = (groups, reciprocal(max(groups, 1)))

    def compiled(c: rope_plan.Config, align: int) -> Callable[..., None]:
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
        places = o.q.data_ptr(), o.kv.data_ptr(), o.cache.data_ptr(), angles
        if any(place & odd for place, odd in zip(places, odds, strict=True)):
            if not narrow:
                narrow.append(compiled(rope_plan.Config(config.warps, config.heads), 1))
            run = narrow[0]
        *tensors, eps = o
        run(*tensors, where, eps)

    return launch


def _apart(tensor: torch.Tensor, span: int, cache: torch.Tensor, cached: int) -> torch.Tensor:
    """``tensor``, which spans so many bytes, or a copy of it where it may share some of the cache's."""
    ahead = cache.data_ptr() - tensor.data_ptr()
    return tensor.clone() if -cached < ahead < span else tensor


def trace_rope(arch: str, **signature: Any) -> compile.Traced:
    """``rope_kernel.py``."""
    from . import rope_kernel

    return rope_kernel.trace(arch, **signature)
