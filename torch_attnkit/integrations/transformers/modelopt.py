"""NVFP4 checkpoints as NVIDIA's Model Optimizer publishes them: experts become fp4_moe's weights, the rest numbers.

A config names them ``quant_method`` "modelopt" with ``quant_algo`` "NVFP4", which transformers does not know. A linear
layer of theirs is ``weight`` (rows, K/2) of E2M1 pairs, ``weight_scale`` (rows, K/16) in E4M3 and ``weight_scale_2``,
a float32 that products are multiplied by: the inverse of fp4_moe's global scale. Experts are published one by one and
put together as the model's own mapping says, or by the names that Model Optimizer gives experts which transformers has
fused; codes and scales keep their bits. Gate and up of an expert must have one ``weight_scale_2``, as they are
exported. Other quantised layers (attention, shared experts) are read back to the model's dtype while they are loaded.
``input_scale``, ``k_scale`` and ``v_scale``, which were calibrated for quantised activations and caches, are not used.

A model whose experts were packed is saved so, too (``saving``), everything else in numbers. Experts that a model stores
by inputs before outputs (GPT-OSS) have another layout there, with one ``weight_scale_2`` for all of them, and are
refused.
Source: the unified checkpoint of Model Optimizer (NVIDIA, 2025 and 2026).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
)
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_attnkit.core import UnsupportedError

from . import saving
from .experts import WEIGHTS, check_computes, hollow, is_experts

_METHOD = "modelopt"
_EXPERTS = tuple(f"experts.{weight}" for weight in WEIGHTS)
# Experts that transformers holds fused and has no mapping for are exported one by one under these names.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_REVERTED = (Chunk, SplitModulelist)  # what cuts fused weights by experts, and by gate and up
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
    refusal: str | None = None
    _experts = False
    _conversions: list[Any] = []

    def adopt(self, packed: list[Any]) -> None:
        """Save a model with these packed experts, or refuse to."""
        self._experts = True
        if any(module.is_transposed for module in packed):
            name = next(type(module).__name__ for module in packed if module.is_transposed)
            self.refusal = (
                f"{name} is stored by inputs before outputs, for which Model Optimizer has one weight_scale_2 for all"
                " experts, where these have one each; accepted: experts='mxfp4', or weights that are not packed"
            )

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise UnsupportedError(
                "modelopt checkpoint: the model is not quantised, accepted: a published NVFP4 checkpoint; for others"
                " call attnkit_model(model, experts='nvfp4')"
            )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        found: dict[str, Any] = {name: module for name, module in model.named_modules() if is_experts(module)}
        self._experts = bool(found)
        for name, module in found.items():
            self._check(name, module)
        _check_complete(model, found, saving.names_in(checkpoint_files) if found else None)
        for module in found.values():
            hollow(module, "nvfp4")
        model._keys_to_ignore_on_load_unexpected = (model._keys_to_ignore_on_load_unexpected or set()) | _UNUSED

    def _check(self, name: str, module: Any) -> None:
        what = f"modelopt checkpoint: {name}"
        if self.quantization_config.leaves(name) or self.quantization_config.leaves(f"{name}.0.down_proj"):
            raise UnsupportedError(f"{what} is left in numbers, accepted: checkpoints in which all experts are NVFP4")
        check_computes(module, f"{what} ({type(module).__name__})", "")
        if module.is_transposed:
            raise UnsupportedError(
                f"{what} ({type(module).__name__}) is stored by inputs before outputs, accepted: experts by outputs"
                " before inputs, which are published one by one"
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        saving.forget(model, self._conversions)
        self._conversions = []
        if not self._experts:  # all numbers now
            self.remove_quantization_config(model)
            return
        # Whatever else was published quantised has been read back.
        names = saving.unquantised(model, patterns=False)  # as where models are packed (swaps.py)
        self.quantization_config = ModelOptConfig("NVFP4", names, group_size=16)
        saving.mark(model, self)
        model.set_experts_implementation("attnkit")

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """The model's own conversions of experts, for codes, scales and global scales in place of weights."""
        found, ours = [], []
        for converter in (*weight_conversions, *_fused()):
            target = converter._original_target_patterns[0]
            if not isinstance(converter, WeightConverter) or not target.endswith(_EXPERTS):
                found.append(converter)
                continue
            sources, made = converter._original_source_patterns, converter.operations
            ours.append(converter.copy(sources, [f"{target}_packed"], operations=made))
            for suffix, part, operations in (
                ("_scale", "_scale", [Bytes(self), *made]),
                ("_scale_2", "_global", [GlobalScales(self)]),
            ):
                named = [source + suffix for source in sources]
                ours.append(converter.copy(named, [target + part], operations=operations))
        # Last: the first converter that fits a name takes it.
        ours.append(WeightConverter(["weight", "weight_scale", "weight_scale_2"], "weight", [Dense(self)]))
        self._conversions = ours
        return [*found, *ours]

    def is_serializable(self) -> bool:
        saving.refuse("modelopt checkpoint", self.refusal)
        return True

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        own = [c for c in get_model_conversion_mapping(model, add_legacy=False) if isinstance(c, WeightConverter)]
        # Of those that put experts together; a mapping of fused weights has no names for each.
        own = [
            c.reverse_transform() for c in own if c._original_target_patterns[0].endswith(_EXPERTS) and _by_expert(c)
        ]

        def publish(name: str, module: Any) -> dict[str, torch.Tensor]:
            return dict(_published(model, name, module, own))

        return saving.published(model, "modelopt checkpoint", publish), {}

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _fused() -> list[WeightConverter]:
    """Conversions of experts that a model has no mapping for."""
    found = []
    for weight, parts in _FUSED.items():
        operations: list[ConversionOps] = [MergeModulelist(dim=0)]
        if len(parts) > 1:
            operations.append(Concatenate(dim=1))
        found.append(WeightConverter([f"experts.*.{part}.weight" for part in parts], f"experts.{weight}", operations))
    return found


def _by_expert(converter: WeightConverter) -> bool:
    return all("*" in source for source in converter._original_source_patterns)


def _check_complete(model: PreTrainedModel, found: dict[str, Any], names: list[str] | None) -> None:
    """A checkpoint without some experts would leave them as memory was."""
    if names is None:
        return
    held = sum(re.search(r"experts\.\d+\.\w+\.weight_scale_2$", name) is not None for name in names)
    wanted = sum(3 * getattr(module, WEIGHTS[0]).shape[0] for module in found.values())  # gate, up and down
    if held < wanted:
        raise UnsupportedError(
            f"modelopt checkpoint: it has weight_scale_2 of {held} products of experts, accepted: of all {wanted} in"
            f" {type(model).__name__}"
        )


def _published(
    model: PreTrainedModel, name: str, module: Any, own: list[WeightConverter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one module under their names, each expert by itself."""
    for weight in WEIGHTS:
        scales = _inverse(getattr(module, f"{weight}_global").view(torch.float32))  # (E,)
        parts = {
            "weight": getattr(module, f"{weight}_packed"),
            "weight_scale": getattr(module, f"{weight}_scale").view(torch.float8_e4m3fn),
            # One for each product, to be cut as the rows are: (E, 2, 1) or (E, 1, 1).
            "weight_scale_2": scales[:, None, None].expand(-1, len(_FUSED[weight]), 1),
        }
        for part, tensor in parts.items():
            for key, cut in _cut(model, f"{name}.{weight}", tensor, own):
                # Expanded scales would share their memory.
                yield key.removesuffix("weight") + part, cut.reshape(()).clone() if part.endswith("_2") else cut


def _cut(
    model: PreTrainedModel, name: str, fused: torch.Tensor, own: list[WeightConverter]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A fused tensor (E, rows, ...) by experts, and by gate and up: as the model's own mapping names them, reversed."""
    for converter in own:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is None:
            continue
        if not all(isinstance(operation, _REVERTED) for operation in converter.operations):
            raise UnsupportedError(
                f"modelopt checkpoint: {name} is put together by {converter.operations}, accepted: experts that are"
                " published one by one, gate and up by themselves"
            )
        converter = deepcopy(converter)
        converter.add_tensor(renamed, name, pattern, fused)
        for key, value in converter.convert(renamed, model=model, config=model.config).items():
            yield key, _list(value)[0]
        return
    module, _, weight = name.rpartition(".")
    for part, halves in zip(_FUSED[weight], fused.chunk(len(_FUSED[weight]), 1), strict=True):
        for expert, cut in enumerate(halves):
            yield f"{module}.{expert}.{part}.weight", cut


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """The float32 numbers (E,) whose inverses, rounded to float32, are ``scale``: it is read back by its bits.

    Of a scale that is a power of two, or was loaded, there is one beside the rounded inverse.
    """
    near = 1 / scale
    up, down = (torch.nextafter(near, torch.full_like(near, end)) for end in (torch.inf, 0.0))
    candidates = torch.stack((near, up, down))  # (3, E)
    fits = 1 / candidates == scale
    assert bool(fits.any(0).all()), "a global scale that is no inverse of a float32"
    return candidates.gather(0, fits.to(torch.uint8).argmax(0, keepdim=True))[0]


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


class Dense(_Load):
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
