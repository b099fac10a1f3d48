"""Experts in vLLM on ``fp4_moe``: weights as vLLM loads them, which is as they were published.

MXFP4 as GPT-OSS has it (rows of gate and up in turn, a byte for 32 numbers) and NVFP4 as Model Optimizer writes it
(gate, then up, an E4M3 number for 16): nothing is converted or copied but the numbers that scale whole experts. Shares
of tensor-parallel processes are slices that vLLM cuts; of expert-parallel ones, experts of others are -1 to the op.
Shared experts are vLLM's: it runs them beside any method that has no kernel of its list.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from torch_attnkit.core import UnsupportedError

ops = torch.ops.attnkit
# What the activation of GPT-OSS is, of which a checkpoint says the limit alone, and vLLM's own method nothing.
_SWIGLU: dict[str, Any] = dict(swiglu="gptoss", alpha=1.702, limit=7.0, interleaved=True)


class _OnOps:
    """What both methods of vLLM's are here: without a kernel of its list, their products by ``fp4_moe``.

    Parameters and loading are vLLM's; the router is, too: ``apply`` gets its choice.
    """

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition  # fp4_moe takes multiples of a block, as formats have them

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """What vLLM's kernels would be told of the weights."""

    def options(self, layer: Any) -> dict[str, Any]:
        """What ``fp4_moe`` is told of the weights of ``layer``."""
        raise NotImplementedError

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
        if layer.expert_map is not None:  # (experts of all processes,) the own ones' numbers, -1 for others
            topk_ids = layer.expert_map[topk_ids.long()]
        return ops.fp4_moe(
            x, topk_weights.float(), topk_ids, layer.w13_weight, layer.w13_weight_scale, layer.w2_weight,
            layer.w2_weight_scale, bias13=getattr(layer, "w13_bias", None), bias2=getattr(layer, "w2_bias", None),
            **self.options(layer),
        )  # fmt: skip


def _check(layer: Any, activation: str) -> None:
    """Raise UnsupportedError for another activation, or router weights that scale the experts' input."""
    if (found := getattr(layer.activation, "value", layer.activation)) != activation:
        raise UnsupportedError(f"attnkit for vLLM: activation of experts is {found!r}, accepted: {activation!r}")
    if layer.apply_router_weight_on_input:
        raise UnsupportedError("attnkit for vLLM: apply_router_weight_on_input is True, accepted: False")


class GptOssOnOps(GptOssMxfp4Config):
    """Keeps the name of vLLM's own configuration: its loader of GPT-OSS asks for that."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def _make_moe_method(self, moe: Any) -> FusedMoEMethodBase:
        return GptOssExperts(moe)


class GptOssExperts(_OnOps, GptOssMxfp4MoEMethod):
    """The experts of GPT-OSS."""

    def __init__(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # past the choice of a kernel
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend, self.moe_kernel = Mxfp4MoeBackend.NONE, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """vLLM makes biases bfloat16 whatever the model is; the op takes the model's dtype."""
        _check(layer, "swigluoai")
        for name in ("w13_bias", "w2_bias"):
            if (bias := getattr(layer, name, None)) is not None:
                bias.data = bias.data.to(layer.params_dtype)

    def options(self, layer: Any) -> dict[str, Any]:
        return dict(format="mxfp4", **_SWIGLU)


class ModelOptOnOps(ModelOptNvFp4Config):
    """Model Optimizer's configuration of NVFP4; its linear layers stay vLLM's."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]


class ModelOptExperts(_OnOps, ModelOptNvFp4FusedMoE):
    """Experts that Model Optimizer wrote. vLLM's loader of weights looks for "ModelOpt" in the name of the class.

    Activations stay in the model's dtype: ``input_scale``, calibrated for quantised ones, is not used.
    """

    def __init__(self, quant_config: ModelOptNvFp4Config, moe_config: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe_config)  # past the choice of a kernel
        self.quant_config, self.use_a16, self.use_global_sf = quant_config, True, False
        self.nvfp4_backend, self.experts_cls, self.moe_kernel = NvFp4MoeBackend.EMULATION, None, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """fp4_moe divides by what a checkpoint multiplies by, one number for gate and up.

        Raises:
            UnsupportedError: experts without a gate, or gate and up with numbers of their own; as ``_check``.
        """
        _check(layer, "silu")
        if not self.moe.is_act_and_mul:
            raise UnsupportedError("attnkit for vLLM: experts have no gate, accepted: gate and up")
        both = layer.w13_weight_scale_2.data  # (E, 2)
        if not torch.equal(both[:, 0], both[:, 1]):
            raise UnsupportedError("attnkit for vLLM: weight_scale_2 of gate and up differ, accepted: one for both")
        layer.w13_global = both[:, 0].reciprocal().contiguous()  # (E,)
        layer.w2_global = layer.w2_weight_scale_2.data.reciprocal().contiguous()

    def options(self, layer: Any) -> dict[str, Any]:
        limit = getattr(layer, "swiglu_limit", None)
        return dict(format="nvfp4", swiglu="silu", limit=limit, w13_global=layer.w13_global, w2_global=layer.w2_global)


ModelOptOnOps.FusedMoEMethodCls = ModelOptExperts
