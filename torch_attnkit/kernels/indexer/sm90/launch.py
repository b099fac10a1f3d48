"""Host side of the Hopper indexer: many tokens, few tokens, or fused selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver

from ...fp4.launch import dequantizer
from ...fp4.problem import Dequantize, Dequantized
from ...prefill.launch import reader
from ..problem import Operands, Problem
from . import plan


def launcher(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What solves ``problem`` on ``target``."""
    p = problem
    return _streams(p, target) if plan.streams(p) else _blocks(p, target)


def _streams(p: Problem, target: Target) -> Callable[[Operands], None]:
    """Few tokens; the other kernel if TMA cannot read the keys."""
    config = stream_config(p, alone=False)
    run = compile.launcher(
        target, p.device, trace_stream,
        config=astuple(config),
    )  # fmt: skip
    read = queries(p, target)
    blocks = min(config.blocks * driver.sm_count(p.device), p.requests * -(-p.entries // plan.TILE))
    others: list[Callable[[Operands], None]] = []

    def launch(o: Operands) -> None:
        if not streamable(o, config):
            if not others:
                others.append(_blocks(p, target))
            return others[0](o)
        run(*streamed(o, read(o), config), o.scores, blocks)

    return launch


def stream_config(p: Problem, alone: bool) -> Any:
    """Of the kernels for few tokens; ``alone``: one CTA per SM."""
    tokens, dtype, stored = plan.tokens_of_request(p), plan.product_dtype(p.format, p.dtype), _stored(p)
    sizes = tokens, p.heads, p.dim * dtype.itemsize
    # Dequantised keys are in registers, which leaves too few for a second CTA.
    if alone or stored == "mxfp4":
        cut = plan.stream_stages(*sizes, plan.row_bytes(stored, p.dim)), 1
    else:
        cut = plan.stream_cut(*sizes)
    types = stored, short(dtype), short(p.weights)
    return plan.StreamConfig(*types, p.heads, p.dim, tokens, *cut, p.paged, *_scaled(p))


def streamable(o: Operands, config: Any) -> bool:
    """Whether TMA can read the keys, and 4-byte copies their block scales."""
    misalignments = [o.k.data_ptr() % 16]
    if config.stored == "mxfp4":
        assert o.k_scale is not None
        misalignments += [o.k_scale.data_ptr() % 4, *(step % 4 for step in o.k_scale.stride()[:-1])]
    return not any(misalignments)


def streamed(o: Operands, q: torch.Tensor, config: Any) -> tuple[torch.Tensor | None, ...]:
    """Tensors that the kernels for few tokens read."""
    scales = o.q_scale if config.q_scale else None, o.k_scale if config.scales else None
    return q, _bytes(o.k), o.weights, o.k_len, o.table, *scales


def _blocks(p: Problem, target: Target) -> Callable[[Operands], None]:
    """Many tokens: keys stay, queries stream."""
    dtype = plan.product_dtype(p.format, p.dtype)
    stored = _stored(p)
    scaled = _scaled(p)
    shape = plan.shape(p.heads, dtype.itemsize, scaled[0])
    stages = plan.stages(p.heads, p.dim * dtype.itemsize, shape[-1])
    fixed = (stored, short(dtype), short(p.weights), p.heads, p.dim, stages, p.ids, p.paged)
    sms = driver.sm_count(p.device)

    def compiled(load: int) -> Callable[..., None]:
        config = plan.Config(*fixed, *scaled, load, *shape)
        tokens = plan.tokens_of_block(p, config.keys, sms)
        run = compile.launcher(target, p.device, trace, config=astuple(config))
        return lambda *arguments: run(*arguments, (tokens, sms))

    size = p.dtype.itemsize
    widest = next(w for w in (16, 8, 4, 2, 1) if w <= size or all(s * size % w == 0 for s in p.k_steps))
    wide, read = compiled(widest), queries(p, target)
    narrow: list[Callable[..., None]] = []

    def launch(o: Operands) -> None:
        aligned = not o.k.data_ptr() & (widest - 1)
        if not aligned and not narrow:
            narrow.append(compiled(size))
        scales = (o.q_scale if scaled[0] else None, o.k_scale)
        run = wide if aligned else narrow[0]
        run(read(o), _bytes(o.k), o.weights, o.k_len, o.ids, o.table, *scales, o.scores)

    return launch


def _stored(p: Problem) -> str:
    """dtype of keys in memory."""
    return "mxfp4" if p.format == "mxfp4" else short(p.dtype)


def _scaled(p: Problem) -> tuple[bool, bool]:
    """Whether q, and k, have float32 scales."""
    return p.format == "fp8" and p.q_scale, p.format == "fp8"


def _bytes(k: torch.Tensor) -> torch.Tensor:
    """E4M3 as bytes, which every torch can export."""
    return k if k.dtype.itemsize > 1 else k.view(torch.uint8)


def queries(p: Problem, target: Target) -> Callable[[Operands], torch.Tensor]:
    """Converts q to the MMA's dtype and to a layout that TMA reads."""
    dtype = plan.product_dtype(p.format, p.dtype)
    if dtype == p.dtype:
        read = reader(p.q, dtype.itemsize)
        return lambda o: read(o.q)
    shape = (p.tokens, p.heads, p.dim)
    steps = (p.q.strides[:-1], p.q_scale_steps)
    decode = dequantizer(Dequantize("mxfp4", p.device, dtype, p.dim, shape[:-1], *steps, swizzled=False), target)

    def decoded(o: Operands) -> torch.Tensor:
        assert o.q_scale is not None
        q = torch.empty(shape, dtype=dtype, device=o.q.device)
        decode(Dequantized(o.q, o.q_scale, None, q))
        return q

    return decoded


def trace(arch: str, **signature: Any) -> compile.Traced:
    """Many tokens."""
    from . import kernel

    return kernel.trace(arch, **signature)


def trace_stream(arch: str, **signature: Any) -> compile.Traced:
    """Few tokens."""
    from . import kernel_few_tokens

    return kernel_few_tokens.trace_stream(arch, **signature)


def trace_select(arch: str, **signature: Any) -> compile.Traced:
    """Few tokens, and which entries they choose."""
    from . import fused_topk

    return fused_topk.trace_select(arch, **signature)
