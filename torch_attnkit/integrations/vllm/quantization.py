"""``--quantization attnkit_mxfp4`` and ``attnkit_nvfp4``: vLLM hands FP4 experts to ``fp4_moe``.

vLLM chooses the kernel of FP4 experts from a closed list, but a configuration of quantisation may be registered under a
name of one's own, and brings the method of its layers. This module is imported in every process of vLLM, and so imports
little: what runs the experts is ``experts``.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

MXFP4, NVFP4 = "attnkit_mxfp4", "attnkit_nvfp4"
_FRONT = "it is what vLLM finds by name; the configuration that from_config makes answers this"


class _Front(QuantizationConfig):
    """What vLLM finds by name; ``from_config`` makes the configuration itself."""

    name = ""

    @classmethod
    def takes(cls, published: dict[str, Any], hf_config: Any) -> bool:
        """Whether a checkpoint with this ``quantization_config`` is one of these."""
        raise NotImplementedError

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name where the user asked for it and the checkpoint is one of these; None leaves the choice to vLLM."""
        return cls.name if user_quant == cls.name and cls.takes(hf_quant_cfg or {}, hf_config) else None

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_name(self) -> Any:
        return self.name

    def get_supported_act_dtypes(self) -> list[Any]:
        raise NotImplementedError(_FRONT)

    @classmethod
    def get_min_capability(cls) -> int:
        raise NotImplementedError(_FRONT)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        raise NotImplementedError(_FRONT)


class AttnkitMxfp4(_Front):
    """The MXFP4 experts of GPT-OSS."""

    name = MXFP4

    @classmethod
    def takes(cls, published: dict[str, Any], hf_config: Any) -> bool:
        kind = published.get("quant_method")
        return getattr(hf_config, "model_type", None) == "gpt_oss" and kind in ("mxfp4", "gpt_oss_mxfp4")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from .experts import GptOssOnOps

        return GptOssOnOps.from_config(config)


class AttnkitNvfp4(_Front):
    """Experts in NVFP4 as Model Optimizer writes them."""

    name = NVFP4

    @classmethod
    def takes(cls, published: dict[str, Any], hf_config: Any) -> bool:
        algo = published.get("quant_algo") or published.get("quantization", {}).get("quant_algo")
        return str(published.get("quant_method", "")).startswith("modelopt") and algo in ("NVFP4", "W4A16_NVFP4")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from .experts import ModelOptOnOps

        return ModelOptOnOps.from_config(config)

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]


def register() -> None:
    """Make the names known to vLLM. Calling it again changes nothing."""
    for front in (AttnkitMxfp4, AttnkitNvfp4):
        register_quantization_config(front.name)(front)
