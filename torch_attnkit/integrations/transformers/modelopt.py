"""NVFP4 checkpoints as NVIDIA's Model Optimizer publishes them: experts become fp4_moe's weights, the rest numbers.

A config names them ``quant_method`` "modelopt" with ``quant_algo`` "NVFP4", which transformers does not know. A linear
layer of theirs is ``weight`` (rows, K/2) of E2M1 pairs, ``weight_scale`` (rows, K/16) in E4M3 and ``weight_scale_2``,
a float32 that products are multiplied by: the inverse of fp4_moe's global scale. Experts are published one by one and
put together as the model's own mapping says; codes and scales keep their bits. Gate and up of an expert must have one
``weight_scale_2``, as they are exported. Other quantised layers (attention, shared experts) are read back to the
model's dtype while they are loaded. ``input_scale``, ``k_scale`` and ``v_scale``, which were calibrated for quantised
activations and caches, are not used.
Source: the unified checkpoint of Model Optimizer (NVIDIA, 2025).
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_attnkit.core import UnsupportedError

from .experts import FAMILIES, WEIGHTS, hollow

_METHOD = "modelopt"
_UNUSED = {r"\.input_scale$", r"\.k_scale$", r"\.v_scale$"}


def register() -> None:
    """Make "modelopt" known to transformers, unless something else has. Calling it again changes nothing."""
    if _METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(_METHOD)(ModelOptConfig)
        auto.register_quantizer(_METHOD)(ModelOptExperts)


class ModelOptConfig(QuantizationConfigMixin):
    """``quantization_config`` of such a checkpoint; what is not named here is kept as it came.

    Raises:
        UnsupportedError: ``quant_algo`` is another one than "NVFP4".
    """

    def __init__(self, quant_algo: str = "", ignore: list[str] | None = None, **others: Any) -> None:
        if quant_algo != "NVFP4":
            raise UnsupportedError(f"modelopt checkpoint: quant_algo is {quant_algo!r}, accepted: 'NVFP4'")
        self.quant_method: Any = _METHOD
        self.quant_algo = quant_algo
        self.ignore = list(ignore or others.pop("exclude_modules", None) or [])
        others.pop("quant_method", None)
        self.__dict__.update(others)

    def leaves(self, module: str) -> bool:
        """Whether the module of this name is published in numbers."""
        return any(fnmatch(module, pattern) for pattern in self.ignore)


class ModelOptExperts(HfQuantizer):
    """Keeps published NVFP4 experts as fp4_moe reads them: buffers ``*_packed``, ``*_scale`` and ``*_global``."""

    quantization_config: ModelOptConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise UnsupportedError(
                "modelopt checkpoint: the model is not quantised, accepted: a published NVFP4 checkpoint; for others"
                " call attnkit_model(model, experts='nvfp4')"
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self._experts = False
        for name, module in model.named_modules():
            if hasattr(module, "is_transposed") and hasattr(module, "is_concatenated"):  # experts, of any family
                self._check(name, module)
                hollow(module, "nvfp4")
                self._experts = True
        model._keys_to_ignore_on_load_unexpected |= _UNUSED

    def _check(self, name: str, module: Any) -> None:
        what = f"modelopt checkpoint: {name}"
        if self.quantization_config.leaves(name) or self.quantization_config.leaves(f"{name}.0.down_proj"):
            raise UnsupportedError(f"{what} is left in numbers, accepted: checkpoints in which all experts are NVFP4")
        if not isinstance(module, FAMILIES):
            accepted = ", ".join(family.__name__ for family in FAMILIES)
            raise UnsupportedError(f"{what} is {type(module).__name__}, accepted: {accepted}")

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self._experts:
            model.set_experts_implementation("attnkit")

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """The model's own conversions of experts, for codes, scales and global scales in place of weights."""
        found = []
        for converter in weight_conversions:
            target = converter._original_target_patterns[0]
            if not isinstance(converter, WeightConverter) or not target.endswith(
                tuple(f"experts.{w}" for w in WEIGHTS)
            ):
                found.append(converter)
                continue
            sources, made = converter._original_source_patterns, converter.operations
            found.append(converter.copy(sources, [f"{target}_packed"], operations=made))
            for suffix, part, operations in (
                ("_scale", "_scale", [Bytes(self), *made]),
                ("_scale_2", "_global", [GlobalScales(self)]),
            ):
                named = [source + suffix for source in sources]
                found.append(converter.copy(named, [target + part], operations=operations))
        # Last: the first converter that fits a name takes it.
        numbers = ["weight", "weight_scale", "weight_scale_2"]
        return [*found, WeightConverter(numbers, "weight", [Numbers(self)])]

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


class _Load(ConversionOps):
    """One that gets tensors in the dtype of the file: transformers asks for ``hf_quantizer`` to know."""

    def __init__(self, hf_quantizer: HfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer


class Bytes(_Load):
    """E4M3 scales as their bytes, which ``model.to(dtype)`` leaves alone."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {key: [t.view(torch.uint8) for t in _list(tensors)] for key, tensors in input_dict.items()}


class GlobalScales(_Load):
    """``weight_scale_2`` of all experts as fp4_moe's global scales (E,), in the bits of a float32."""

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        parts = [torch.stack([t.reshape(()) for t in _list(tensors)]) for tensors in input_dict.values()]  # (E,) each
        for other in parts[1:]:
            if not torch.equal(parts[0], other):
                expert = int((parts[0] != other).nonzero()[0])
                raise UnsupportedError(
                    f"modelopt checkpoint: {full_layer_name}: weight_scale_2 of gate and up of expert {expert} are"
                    f" {float(parts[0][expert])} and {float(other[expert])}, accepted: equal ones"
                )
        return {full_layer_name: (1 / parts[0].float()).view(torch.int32)}


class Numbers(_Load):
    """The weight of a quantised linear layer in numbers of the model's dtype; one that is not quantised as it is."""

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: PreTrainedModel, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        tensors = {re.sub(r"^.*weight", "weight", key): _list(value)[0] for key, value in input_dict.items()}
        dtype = model.get_parameter(full_layer_name).dtype
        if "weight_scale" not in tensors:
            return {full_layer_name: tensors["weight"].to(dtype)}
        scale = tensors["weight_scale"].view(torch.uint8)
        inverse = 1 / tensors["weight_scale_2"].float().reshape(())
        read = torch.ops.attnkit.nvfp4_dequantize(tensors["weight"], scale, inverse, dtype=dtype)
        return {full_layer_name: read}


def _list(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]
