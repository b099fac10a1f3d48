"""Humming (humming-kernels 0.1.19): FP4 weights with bf16 rows, its kernels compiled at run time for each shape.

Tiles come from its own heuristics for the number of routes. Its products read rows through vLLM's index of aligned
routes, so ``_moe_C`` is needed, too (see ``vllm_ops``). It compiles by NVRTC, or by nvcc with ``HUMMING_COMPILER`` as
``nvcc``; ``HUMMING_DISABLE_PARALLEL_BUILD=1`` keeps it from compiling other tiles while calls are timed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.peers.moe_layer import Layer, Weights, call_of

_LOCKS = 8192  # of a product whose tiles add up along K


@dataclass(frozen=True)
class Product:
    """One product of a layer: what Humming calls its configuration, and the tensors that it made of the weights."""

    config: Any
    tensors: dict[str, torch.Tensor]
    locks: torch.Tensor

    def tuning(self, routes: int, gemm: str) -> dict[str, Any]:
        from humming.tune import get_heuristics_config

        found: dict[str, Any] = get_heuristics_config(
            layer_config=self.config, shape_m=routes, gemm_type=gemm, device=0
        )
        return found

    def run(self, gemm: str, routes: int, top_k: int = 1) -> Callable[..., torch.Tensor]:
        """``call(rows, **routing)``: (routes, rows of the weights)."""
        from humming.forward import humming_forward

        given = dict(
            locks=self.locks, top_k=top_k, valid_shape_m=routes, compute_config=compute(gemm),
            tuning_config=json.dumps(self.tuning(routes, gemm)), **self.tensors,
        )  # fmt: skip
        width = self.config.shape_n - self.config.pad_shape_n

        def call(rows: torch.Tensor, **routing: torch.Tensor) -> torch.Tensor:
            out = rows.new_empty(routes, width)
            humming_forward(self.config, inputs=rows, outputs=out, **routing, **given)
            return out

        return call


def compute(gemm: str) -> str:
    return json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm})


def config_of(w: Weights, format: str) -> Any:
    """Humming's description of a product; rows and depth are padded as vLLM pads them."""
    from humming import dtypes
    from humming.config import WeightScale2Type, WeightScaleType
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema: dict[str, Any] = dict(bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32)
    if format == "nvfp4":
        schema = dict(
            bs_dtype=dtypes.float8e4m3, weight_scale_group_size=16, weight_scale_type=WeightScaleType.GROUP,
            weight_scale_2_type=WeightScale2Type.TENSOR,
        )  # fmt: skip
    return prepare_layer_config(
        shape_n=w.rows, shape_k=w.depth, weight_schema=HummingWeightSchema(b_dtype=dtypes.float4e2m1, **schema),
        input_schema=HummingInputSchema(a_dtype=None), num_experts=len(w.codes), pad_n_to_multiple=256,
        pad_k_to_multiple=128, has_bias=w.bias is not None, torch_dtype=torch.bfloat16, device=0,
    )  # fmt: skip


def _product(w: Weights, format: str) -> Product:
    from humming.transform import transform_humming_tensors

    config = config_of(w, format)
    kind = torch.float8_e4m3fn if format == "nvfp4" else torch.float8_e8m0fnu
    tensors = {"weight": w.codes.view(torch.int32), "weight_scale": w.scale.view(kind)}
    if w.factor is not None:
        tensors["weight_scale_2"] = w.factor
    if w.bias is not None:
        tensors["bias"] = w.bias
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=w.codes.device)
    return Product(config, transform_humming_tensors(config, tensors), locks)


@functools.lru_cache(maxsize=1)
def products(layer: Layer) -> tuple[Product, Product]:
    return _product(layer.up, layer.format), _product(layer.down, layer.format)


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    given = call_of(op, args, kwargs)
    if given is None:
        return None
    from bench.peers import moe_steps as steps
    from bench.peers import vllm_ops

    vllm_ops.moe()
    up, down = products(given.layer)
    (Tq, K), experts = given.indices.shape, given.layer.experts
    first, second = up.run("indexed", Tq * K, K), down.run("indexed", Tq * K)
    tiles = [p.tuning(Tq * K, "indexed")["block_shape"][0] for p in (up, down)]
    indices = {tile: vllm_ops.Aligned(given.indices, experts, tile) for tile in tiles}  # one if the tiles are equal

    def routing(tile: int) -> dict[str, torch.Tensor]:
        aligned = indices[tile]
        return dict(sorted_ids=aligned.ids, expert_ids=aligned.experts, num_tokens_padded=aligned.padded)

    def call() -> torch.Tensor:
        for aligned in indices.values():
            aligned.sort()
        h = steps.swiglu(first(given.x, **routing(tiles[0])), given.act)  # (Tq * K, M)
        return steps.combine(second(h, **routing(tiles[1])), given.weights)

    return call
