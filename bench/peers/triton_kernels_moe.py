"""triton_kernels (``matmul_ogs``), GPT-OSS's own, which vLLM ships: MXFP4 weights, SwiGLU inside the first product.

Its weights have their layout for Hopper. It routes from logits; here the routes are given, and torch sorts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.peers.moe_layer import Layer, Swiglu, Weights, call_of, interleave

_WARPS = 8  # what the layout of scales is made for


@dataclass(frozen=True)
class Packed:
    codes: Any  # (E, K, rows) in the package's layout
    precision: Any  # with the scales
    bias: torch.Tensor | None  # (E, rows) float32


def _pack(w: Weights, interleaving: bool) -> Packed:
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
    codes, scale, bias = (interleave(t) if interleaving and t is not None else t for t in (w.codes, w.scale, w.bias))
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[2] % 4))
    kind, given = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    packed = convert_layout(wrap_torch_tensor(codes.transpose(1, 2), dtype=FP4), kind, **given)
    kind, given = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=_WARPS)
    scale = convert_layout(wrap_torch_tensor(scale.transpose(1, 2)), kind, **given)
    precision = PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=InFlexData()))
    return Packed(packed, precision, None if bias is None else bias.float())


@functools.lru_cache(maxsize=1)
def _packed(layer: Layer) -> tuple[Packed, Packed]:
    return _pack(layer.up, True), _pack(layer.down, False)


def _activation(act: Swiglu) -> Any:
    """The package's own for GPT-OSS; the other form is a function that its product takes as well."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
    from triton_kernels.swiglu import swiglu_fn

    if act.gptoss:
        return FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (act.alpha, act.limit), 2)
    from bench.peers.moe_epilogue import silu_of_pairs

    return FusedActivation(FnSpecs("silu_of_pairs", silu_of_pairs, ("limit",)), (act.limit,), 2)


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    given = call_of(op, args, kwargs)
    if given is None or given.layer.format != "mxfp4":
        return None
    from triton_kernels.matmul_ogs import matmul_ogs
    from triton_kernels.routing import GatherIndx, RoutingData, ScatterIndx, compute_expt_data

    from bench.peers import moe_steps as steps

    x, weights, indices, layer = given.x, given.weights, given.indices, given.layer
    up, down = _packed(layer)
    activation, K, R = _activation(given.act), indices.shape[1], indices.numel()
    experts = torch.arange(layer.experts, dtype=torch.int16, device=x.device)
    nothing = torch.zeros(1, dtype=torch.int32, device=x.device)

    def call() -> torch.Tensor:
        order = steps.by_expert(indices, experts)
        counts = order.ends.diff(prepend=nothing)  # (E,)
        route, position = order.route.int(), order.position.flatten().int()  # (R,) each
        gammas = weights.flatten()[order.route]
        routing = RoutingData(gammas, counts, layer.experts, K, compute_expt_data(counts, layer.experts, R))
        h = matmul_ogs(
            x, up.codes, up.bias, routing, gather_indx=GatherIndx(src_indx=route, dst_indx=position),
            precision_config=up.precision, fused_activation=activation,
        )  # fmt: skip  # (R, M)
        return matmul_ogs(
            h, down.codes, down.bias, routing, scatter_indx=ScatterIndx(src_indx=position, dst_indx=route),
            precision_config=down.precision, gammas=gammas,
        )  # fmt: skip

    return call
