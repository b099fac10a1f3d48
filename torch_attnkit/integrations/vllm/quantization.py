"""``--quantization attnkit_mxfp4``: vLLM hands the MXFP4 experts of GPT-OSS to ``fp4_moe``.

vLLM chooses the kernel of MXFP4 experts from a closed list, but a configuration of quantisation may be registered under
a name of one's own, and brings the method of its layers. This module is imported in every process of vLLM, and so
imports little: what runs the experts is ``experts``, which vLLM's own method of GPT-OSS loads the weights for.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

NAME = "attnkit_mxfp4"
_FRONT = "AttnkitMxfp4 is what vLLM finds by name; the configuration that from_config makes answers this"


class AttnkitMxfp4(QuantizationConfig):
    """The front that vLLM finds by name; ``from_config`` makes the configuration itself."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """NAME where the user asked for it and the checkpoint is an MXFP4 GPT-OSS; None leaves the choice to vLLM."""
        if user_quant != NAME or getattr(hf_config, "model_type", None) != "gpt_oss":
            return None
        return NAME if (hf_quant_cfg or {}).get("quant_method") in ("mxfp4", "gpt_oss_mxfp4") else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from .experts import GptOssOnOps

        return GptOssOnOps.from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[Any]:
        raise NotImplementedError(_FRONT)

    @classmethod
    def get_min_capability(cls) -> int:
        raise NotImplementedError(_FRONT)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        raise NotImplementedError(_FRONT)


def register() -> None:
    """Make NAME known to vLLM. Calling it again changes nothing."""
    register_quantization_config(NAME)(AttnkitMxfp4)
