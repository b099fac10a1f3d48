"""The experts of GPT-OSS in vLLM on ``fp4_moe``: weights as vLLM loads them, which is as they were published.

Rows of gate and up stay in turn and scales one byte for 32 numbers, so that nothing is converted or copied. Shares of
tensor-parallel processes are slices that vLLM cuts; of expert-parallel ones, experts of others are -1 to the op.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from torch_attnkit.core import UnsupportedError

ops = torch.ops.attnkit
# What the activation of GPT-OSS is, of which a checkpoint says the limit alone, and vLLM's own method nothing.
_SWIGLU: dict[str, Any] = dict(swiglu="gptoss", alpha=1.702, limit=7.0, interleaved=True)


class GptOssOnOps(GptOssMxfp4Config):
    """Keeps the name of vLLM's own configuration: its loader of GPT-OSS asks for that."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def _make_moe_method(self, moe: Any) -> FusedMoEMethodBase:
        return ExpertsOnOps(moe)


class ExpertsOnOps(GptOssMxfp4MoEMethod):
    """vLLM's method for these weights without a kernel of its list: parameters and loading are its, products ours."""

    def __init__(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # past the choice of a kernel
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend, self.moe_kernel = Mxfp4MoeBackend.NONE, None

    @property
    def is_monolithic(self) -> bool:
        """The router is vLLM's: ``apply`` gets its choice."""
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition  # fp4_moe takes multiples of 32, as the format has them

    def process_weights_after_loading(self, layer: Any) -> None:
        """vLLM makes biases bfloat16 whatever the model is; the op takes the model's dtype.

        Raises:
            UnsupportedError: another activation than GPT-OSS', or router weights that scale the experts' input.
        """
        if (found := getattr(layer.activation, "value", layer.activation)) != "swigluoai":
            raise UnsupportedError(f"attnkit for vLLM: activation of experts is {found!r}, accepted: 'swigluoai'")
        if layer.apply_router_weight_on_input:
            raise UnsupportedError("attnkit for vLLM: apply_router_weight_on_input is True, accepted: False")
        for name in ("w13_bias", "w2_bias"):
            if (bias := getattr(layer, name, None)) is not None:
                bias.data = bias.data.to(layer.params_dtype)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """What vLLM's kernels would be told of the weights."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x (T, N), the weights and ids (T, K) of its experts -> (T, N)."""
        if shared_experts is not None:
            raise UnsupportedError("attnkit for vLLM: there are shared experts, accepted: None")
        if layer.expert_map is not None:  # (experts of all processes,) the own ones' numbers, -1 for others
            topk_ids = layer.expert_map[topk_ids.long()]
        return ops.fp4_moe(
            x, topk_weights.float(), topk_ids, layer.w13_weight, layer.w13_weight_scale, layer.w2_weight,
            layer.w2_weight_scale, bias13=getattr(layer, "w13_bias", None), bias2=getattr(layer, "w2_bias", None),
            format="mxfp4", **_SWIGLU,
        )  # fmt: skip
