"""A call of kv_cache_gather as a problem of the kernels on cache rows."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.cache.problem import Operands, Problem, Row


def problem(call: Call) -> Problem:
    a, dim, plain = call.arg, call.dim, call.arg.format == "none"
    dtype = a.dtype or (a.cache.dtype if plain else torch.float32)
    return Problem(
        Row(a.format, dim["D"], 0 if plain else a.rope_dim), call.device, dtype, a.cache.dtype, a.slot.dtype, dim["R"],
        dim["Nc"], dim["D"], a.cache.stride(0) if dim["Nc"] > 1 else 0, a.global_scale is not None,
    )  # fmt: skip


def operands(cache, slot, global_scale, format, head_dim, rope_dim, dtype, out) -> Operands:
    return Operands(out, cache, slot, global_scale)
