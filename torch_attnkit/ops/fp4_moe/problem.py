"""A call of fp4_moe as a problem of the grouped products."""

from __future__ import annotations

import torch

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.grouped_gemm.problem import Operands, Problem, Weights


def problem(call: Call) -> Problem:
    a, d = call.arg, call.dim
    return Problem(
        device=call.device,
        dtype=a.x.dtype,
        index_dtype=a.indices.dtype,
        tokens=d["Tq"],
        top_k=d["K"],
        experts=d["E"],
        up=_weights(a.w13, a.w13_scale),
        down=_weights(a.w2, a.w2_scale),
        format=a.format,
        activations=a.activations,
        swiglu=a.swiglu,
        alpha=a.alpha,
        limit=a.limit,
        interleaved=a.interleaved,
        scale_layout=a.scale_layout,
    )


def _weights(codes: torch.Tensor, scale: torch.Tensor) -> Weights:
    _, rows, nbytes = codes.shape
    (expert, row, _), (scale_expert, scale_row, _) = codes.stride(), scale.stride()
    return Weights(rows, 2 * nbytes, expert, row, scale_expert, scale_row, scale.shape[2])


def operands(
    x, weights, indices, w13, w13_scale, w2, w2_scale, w13_global, w2_global, bias13, bias2, x_global, h_global,
    format, activations, swiglu, alpha, limit, interleaved, scale_layout, out,
) -> Operands:  # fmt: skip
    return Operands(
        x, weights, indices, w13, w13_scale, w2, w2_scale, w13_global, w2_global, bias13, bias2, x_global, h_global, out
    )
