"""Checkpoints with MXFP4 experts, loaded as they are published: their bytes become fp4_moe's weights.

transformers finds a quantizer by the name in a checkpoint's config. Here "mxfp4" (GPT-OSS) gets one that keeps blocks
and scales as they lie in the file, on every device, where transformers' own multiplies with a kernel for some GPUs or
else makes bfloat16 of them, four times the memory. Rows of blocks (E, rows, K/32, 16) are rows of K/2 bytes already: a
view, so that loading holds the checkpoint once. The model comes back with its experts packed (``experts.py``) and its
experts implementation set to "attnkit"; attention is chosen as always (``attn_implementation="attnkit"``, or
``attnkit_model``). It is saved under the names it was published with.

``Mxfp4Config(dequantize=True)``, models without experts that fp4_moe takes, and models that are quantised while they
are loaded are left to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from .experts import FAMILIES, WEIGHTS, hollow

_BYTES = 16  # of codes under one scale, the last axis of published blocks


def register() -> None:
    """Let checkpoints of MXFP4 experts come to this quantizer. Calling it again changes nothing."""
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = Mxfp4Experts


class Mxfp4Experts(Mxfp4HfQuantizer):
    """Keeps published MXFP4 experts as fp4_moe reads them: buffers ``*_packed`` (E, rows, K/2), ``*_scale``."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """What transformers' own path needs is asked for once it is known to be taken: the model is not known here."""
        self._asked = args, kwargs

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        found = [] if self._theirs() else [m for m in model.modules() if isinstance(m, FAMILIES)]
        self._keeps = bool(found)
        if not found:
            super().validate_environment(*self._asked[0], **self._asked[1])
            super()._process_model_before_weight_loading(model, **kwargs)
            return
        for module in found:
            hollow(module, "mxfp4")

    def _theirs(self) -> bool:
        return not self.pre_quantized or self.quantization_config.dequantize

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        super()._process_model_after_weight_loading(model, **kwargs)
        if self._keeps:
            model.set_experts_implementation("attnkit")

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return not self._keeps and super().param_needs_quantization(model, param_name, **kwargs)

    def get_weight_conversions(self) -> list[Any]:
        if not self._keeps:
            return super().get_weight_conversions()
        conversions: list[Any] = []
        for name in WEIGHTS:
            conversions.append(WeightConverter(f"{name}_blocks", f"{name}_packed", [Rows()]))
            conversions.append(WeightRenaming(f"{name}_scales", f"{name}_scale"))
        return conversions

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        if not self._keeps:
            return super().update_weight_conversions(weight_conversions, model)
        return weight_conversions + self.get_weight_conversions()

    @property
    def is_compileable(self) -> bool:
        return self._keeps or super().is_compileable


class Rows(ConversionOps):
    """Published blocks (E, rows, K/32, 16) as rows of bytes (E, rows, K/2); no copy."""

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {full_layer_name: _only(input_dict).flatten(2)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Blocks()


class Blocks(ConversionOps):
    """Rows of bytes (E, rows, K/2) as published blocks (E, rows, K/32, 16); no copy."""

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {full_layer_name: _only(input_dict).unflatten(2, (-1, _BYTES))}

    @property
    def reverse_op(self) -> ConversionOps:
        return Rows()


def _only(tensors: dict[str, Any]) -> torch.Tensor:
    """The one tensor that a conversion was handed, which transformers may have put into a list."""
    value = next(iter(tensors.values()))
    return value[0] if isinstance(value, list) else value
