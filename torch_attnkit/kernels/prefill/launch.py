"""Host side of the prefill kernels for NVIDIA GPUs: scalars, sections of heads, layouts that TMA can read.

``launcher`` is Blackwell's, for dense batches and packed sequences; Hopper's are in ``sm90/launch.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import invariance
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ..scores import LOG2_E, MOST, Scores
from .problem import Layout, Operands, PagedOperands, Problem

# Bytes of keys and values that one section of heads may fill, of an H200's 50 MB of L2: 1 to 2 % there (docs/lab).
_L2 = 16 << 20


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem``, of dense batches or packed sequences, on Blackwell."""
    from .sm100 import plan

    p = without_idle_window(problem)
    signature = plan.signature(p) | ({} if p.packed else dict(kv_len=p.kv_len, kv_start=p.kv_start))
    return static(p, target, trace_packed if p.packed else trace_dense, signature, plan.sharers(p, signature))


def static(
    problem: Problem, target: Target, trace: compile.Trace, signature: dict[str, Any], sharers: int
) -> Callable[[Operands], None]:
    """The launch of a kernel whose persistent CTAs know their tiles; ``sharers`` as in ``section``."""
    p = problem
    run = compile.launcher(target, p.device, trace, **signature)
    start = reading(run, p, static_scalars(p, sharers))

    def launch(operands: Operands) -> None:
        if operands.lse.numel() == 0:
            return
        if has_no_keys(p):
            return nothing_attended(operands)
        start(operands)

    return launch


def has_no_keys(problem: Problem) -> bool:
    return problem.keys == 0 or (problem.packed and problem.batch == 0)


def static_scalars(problem: Problem, sharers: int) -> tuple[Any, ...]:
    p = problem
    return scalars(p.scores, 1 if p.packed else section(p, sharers), driver.sm_count(p.device))


def without_idle_window(problem: Problem) -> Problem:
    """The same without a window as wide as a sequence can be long, where the batch may decide on kernels."""
    if invariance.is_on():
        return problem
    s = problem.scores
    longest = problem.keys if problem.causal and not problem.packed else max(problem.keys, problem.queries)
    return dataclasses.replace(problem, scores=dataclasses.replace(s, window=-1)) if s.window >= longest else problem


def scalars(scores: Scores, heads: int, sms: int) -> tuple[Any, ...]:
    """The kernel's Scalars."""
    scale = scores.softcap if scores.capped else abs(scores.factor) or 1.0
    return (scale * LOG2_E, scores.slope if scores.capped else 0.0, *scores.bounds, heads, sms)


def section(problem: Problem, sharers: int) -> int:
    """Query heads whose keys and values fit in L2 together; ``sharers`` work tiles of the same queries share a KV
    head."""
    nbytes = max(1, problem.keys * (problem.dim + problem.dim_v) * problem.dtype.itemsize)  # of a KV head
    return min(max(1, _L2 // nbytes) * sharers, MOST)


def sign(scores: Scores) -> int:
    """What q is multiplied by for the kernel: it takes maxima of scores that are not scaled yet, and a masked score
    of -inf must not meet a scale of 0."""
    return 1 if scores.capped else (scores.factor > 0) - (scores.factor < 0)


def signed(q: torch.Tensor, by: int) -> torch.Tensor:
    """q times 0 or -1, of E4M3 too, for which torch has no product: its sign is a bit of its own."""
    if by == 0:
        return (q.float() * 0).to(q.dtype)  # nan stays nan
    return q.neg() if q.dtype.itemsize > 1 else (q.view(torch.uint8) ^ 128).view(q.dtype)


def _strides(layout: Layout, step: int) -> tuple[int, ...] | None:
    """Strides that TMA accepts for the same elements: multiples of ``step``, where the size is 1 too. None: no such."""
    found = []
    for size, stride in zip(layout.shape[:-1], layout.strides[:-1], strict=True):
        if size > 1 and (stride % step or stride == 0):
            return None
        found.append(step if size == 1 else stride)
    return (*found, 1)


def reader(layout: Layout, itemsize: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Brings a tensor of this layout into one that TMA reads; copies it if no view will do.

    E4M3 becomes bytes, which every torch can pass on.
    """
    strides = _strides(layout, 16 // itemsize)
    same = strides == layout.strides

    def read(t: torch.Tensor) -> torch.Tensor:
        t = t if itemsize > 1 else t.view(torch.uint8)
        if strides is None or t.data_ptr() % 16:
            return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
        return t if same else t.as_strided(t.shape, strides)

    return read


def query_reader(problem: Problem) -> Callable[[torch.Tensor], torch.Tensor]:
    """``reader`` of q times ``sign``; the product lies in memory as it likes, not as q."""
    by, itemsize = sign(problem.scores), problem.dtype.itemsize
    if by > 0:
        return reader(problem.q, itemsize)
    read = reader(Layout.of(torch.empty(problem.q.shape, device="meta")), itemsize)
    return lambda t: read(signed(t, by).contiguous())


def reading(run: Callable[..., None], problem: Problem, values: tuple[Any, ...]) -> Callable[[Operands], None]:
    """What runs a kernel on tensors brought into its layouts, in the order of its Inputs and Outputs."""
    itemsize = problem.dtype.itemsize
    read_q, read_k, read_v = query_reader(problem), reader(problem.k, itemsize), reader(problem.v, itemsize)
    scaled, packed, normalize = any(problem.scales), problem.packed, problem.normalize

    def start(o: Operands) -> None:
        low, high = (o.cu_q, o.cu_k) if packed else (o.kv_start, o.kv_len)
        ins = (read_q(o.q), read_k(o.k), read_v(o.v), o.sink, low, high, o.scales if scaled else None)
        run(ins, (o.out, o.lse, None if normalize else o.row_sum), values)

    return start


def nothing_attended(operands: Operands | PagedOperands) -> None:
    """The results of queries that have no keys."""
    operands.out.zero_()
    operands.lse.fill_(-torch.inf)
    if isinstance(operands, Operands) and operands.row_sum is not None:
        operands.row_sum.zero_()


def trace_dense(arch: str, **signature: Any) -> compile.Traced:
    """Dense batches on Blackwell."""
    from .sm100 import kernel

    return kernel.trace_dense(arch, **signature)


def trace_packed(arch: str, **signature: Any) -> compile.Traced:
    """Packed sequences on Blackwell."""
    from .sm100 import kernel

    return kernel.trace_packed(arch, **signature)
