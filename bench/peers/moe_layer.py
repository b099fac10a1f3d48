"""A call of fp4_moe as other packages take it: which calls they can compute, and its weights in one common form.

Packing gigabytes takes seconds, and the lines of a model and their input sets share the tensors: the last layer is
kept, and what a peer packed from it is kept with it, by ``functools.lru_cache`` on the ``Layer``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.oracle import fp4


@dataclass(frozen=True, eq=False)
class Weights:
    """The matrices of one product: E2M1 codes, linear scales as bytes, what a product is multiplied by, a bias."""

    codes: torch.Tensor  # (E, rows, K/2)
    scale: torch.Tensor  # (E, rows, K/block)
    factor: torch.Tensor | None  # (E,) float32: 1 over our global scales; MXFP4 has none
    bias: torch.Tensor | None  # (E, rows)

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    @property
    def depth(self) -> int:
        return 2 * self.codes.shape[2]


@dataclass(frozen=True, eq=False)
class Layer:
    format: str
    block: int
    up: Weights  # rows are all gates, then all ups
    down: Weights

    @property
    def experts(self) -> int:
        return self.up.codes.shape[0]


@dataclass(frozen=True)
class Swiglu:
    gptoss: bool
    alpha: float
    limit: float


@dataclass(frozen=True)
class Call:
    """What changes from call to call: x (Tq, N), weights (Tq, K) float32, indices (Tq, K) int32."""

    x: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    layer: Layer
    act: Swiglu


def call_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """None if no peer computes it: bf16 and activations as they are only, and each route leads to an expert."""
    if op != "fp4_moe" or kwargs.get("activations", "none") != "none" or args[0].dtype != torch.bfloat16:
        return None
    x, weights, indices, *tensors = args
    if not indices.numel() or int(indices.min()) < 0:
        return None
    tensors = [*tensors, *[None] * (8 - len(tensors))][:8]
    format, interleaved = kwargs.get("format", "nvfp4"), bool(kwargs.get("interleaved"))
    layer = _layer(format, interleaved, kwargs.get("scale_layout", "linear"), *tensors)
    limit = float("inf") if kwargs.get("limit") is None else kwargs["limit"]
    act = Swiglu(kwargs.get("swiglu") == "gptoss", kwargs.get("alpha", 1.702), limit)
    return Call(x.contiguous(), weights.contiguous(), indices.int().contiguous(), layer, act)


@functools.lru_cache(maxsize=1)
def _layer(format: str, interleaved: bool, scale_layout: str, *tensors: Any) -> Layer:
    w13, w13_scale, w2, w2_scale, g13, g2, bias13, bias2 = tensors
    block = fp4.BLOCK[format]
    weights = []
    for codes, scale, scale_of, bias in ((w13, w13_scale, g13, bias13), (w2, w2_scale, g2, bias2)):
        scale = fp4.load_scale(scale, scale_layout, codes.shape[1], 2 * codes.shape[2] // block)
        if format == "nvfp4":
            ones = torch.ones(len(codes), device=codes.device)
            scale_of = ones if scale_of is None else 1 / scale_of
        weights.append(Weights(codes, scale, scale_of, bias))
    up, down = weights
    if interleaved:
        codes, scale, bias = (None if t is None else halves(t) for t in (up.codes, up.scale, up.bias))
        up = Weights(codes, scale, up.factor, bias)
    return Layer(format, block, up, down)


def halves(rows: torch.Tensor) -> torch.Tensor:
    """(E, 2M, ...) of gate and up in turn to all gates, then all ups."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """(E, 2M, ...) of all gates, then all ups, to gate and up in turn."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
