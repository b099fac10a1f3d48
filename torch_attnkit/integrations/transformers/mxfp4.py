"""Checkpoints with MXFP4 experts, loaded as they are published: their bytes become fp4_moe's weights.

transformers finds a quantizer by the name in a checkpoint's config. Here "mxfp4" (GPT-OSS) gets one that keeps blocks
and scales as they lie in the file, on every device, where transformers' own multiplies with a kernel for some GPUs or
else makes bfloat16 of them, four times the memory. Rows of blocks (E, rows, K/32, 16) are rows of K/2 bytes already: a
view, so that loading holds the checkpoint once. The model comes back with its experts packed (``experts.py``) and its
experts implementation set to "attnkit"; attention is chosen as always (``attn_implementation="attnkit"``, or
``attnkit_model``). It is saved under the names it was published with. Experts of other families have the same layout
under their own names, which is how a model that attnkit_model packed is saved (``saving``).

``Mxfp4Config(dequantize=True)``, checkpoints without blocks for the experts of the model, and models that are quantised
while they are loaded are left to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from torch_attnkit.core import UnsupportedError

from . import saving
from .experts import WEIGHTS, hollow, runs

_BYTES = 16  # of codes under one scale, the last axis of published blocks


def register() -> None:
    """Let checkpoints of MXFP4 experts come to this quantizer. Calling it again changes nothing."""
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = Mxfp4Experts


class Mxfp4Experts(Mxfp4HfQuantizer):
    """Keeps published MXFP4 experts as fp4_moe reads them: buffers ``*_packed`` (E, rows, K/2), ``*_scale``."""

    refusal: str | None = None
    _keeps = False
    _conversions: list[Any] = []

    def adopt(self, packed: list[Any]) -> None:
        """Save a model with these packed experts. Every family has the layout."""
        self._keeps = True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """What transformers' own path needs is asked for once it is known to be taken: the model is not known here."""
        self._asked = args, kwargs

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        found = [] if self._theirs() else [m for m in model.modules() if runs(m)]
        names = saving.names_in(checkpoint_files) if found else None
        held = None if names is None else sum(name.endswith(f"{WEIGHTS[0]}_blocks") for name in names)
        self._keeps = bool(found) and held != 0
        if not self._keeps:
            super().validate_environment(*self._asked[0], **self._asked[1])
            super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **kwargs)
            return
        if held is not None and held < len(found):
            raise UnsupportedError(
                f"mxfp4 checkpoint: it has {WEIGHTS[0]}_blocks of {held} layers, accepted: of all {len(found)} with"
                f" experts in {type(model).__name__}"
            )
        for module in found:
            hollow(module, "mxfp4")

    def _theirs(self) -> bool:
        return not self.pre_quantized or self.quantization_config.dequantize

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        super()._process_model_after_weight_loading(model, **kwargs)
        if self._keeps:
            saving.forget(model, self._conversions)
            self._conversions = []
            saving.mark(model, self)
            model.set_experts_implementation("attnkit")

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return not self._keeps and super().param_needs_quantization(model, param_name, **kwargs)

    def get_weight_conversions(self) -> list[Any]:
        if not self._keeps:
            return super().get_weight_conversions()
        self._conversions = []
        for name in WEIGHTS:
            self._conversions.append(WeightConverter(f"{name}_blocks", f"{name}_packed", [Rows()]))
            self._conversions.append(WeightRenaming(f"{name}_scales", f"{name}_scale"))
        return self._conversions

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        if not self._keeps:
            return super().update_weight_conversions(weight_conversions, model)
        return weight_conversions + self.get_weight_conversions()

    def is_serializable(self) -> bool:
        saving.refuse("mxfp4 checkpoint", self.refusal)
        return super().is_serializable()

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, Any]]:
        if not self._keeps:
            return super().get_state_dict_and_metadata(model)
        return saving.published(model, "mxfp4 checkpoint", _published), {}

    @property
    def is_compileable(self) -> bool:
        return self._keeps or super().is_compileable


def _published(name: str, module: Any) -> dict[str, torch.Tensor]:
    """Blocks (E, rows, K/32, 16) and scales (E, rows, K/32) of one module; no copies."""
    state = {}
    for weight in WEIGHTS:
        state[f"{name}.{weight}_blocks"] = getattr(module, f"{weight}_packed").unflatten(2, (-1, _BYTES))
        state[f"{name}.{weight}_scales"] = getattr(module, f"{weight}_scale")
    return state


class Rows(ConversionOps):
    """Published blocks (E, rows, K/32, 16) as rows of bytes (E, rows, K/2); no copy."""

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        value = next(iter(input_dict.values()))  # which transformers may have put into a list
        return {full_layer_name: (value[0] if isinstance(value, list) else value).flatten(2)}
