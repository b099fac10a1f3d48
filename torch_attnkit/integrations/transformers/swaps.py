"""attnkit_model: replace what has an op in a loaded model, module by module; and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Mxfp4Config, PreTrainedConfig, PreTrainedModel

from torch_attnkit.core import UnsupportedError

from . import deepseek_v4, joined, linear_attention, mla, norms, routers, saving
from .experts import experts_of, pack, packed_format
from .modelopt import ModelOptConfig, ModelOptExperts
from .mxfp4 import Mxfp4Experts

SWAPS: dict[type, type] = {**linear_attention.SWAPS, **norms.SWAPS, **routers.SWAPS, **deepseek_v4.SWAPS, **mla.SWAPS}
_ORIGINAL = {swapped: original for original, swapped in SWAPS.items()}


@torch.no_grad()
def attnkit_model(model: PreTrainedModel, *, experts: str | None = None, activations: str = "none") -> PreTrainedModel:
    """Run ``model`` on the ops of this package. Works in place and returns ``model``.

    Sets the attention implementation to "attnkit" and gives Gated DeltaNet layers and their norms (Qwen3.5,
    Qwen3-Next), routers (GPT-OSS, Qwen, DeepSeek-V4) and the attention of DeepSeek-V3 and V4 a subclass of their class,
    which keeps parameters, state_dict, hooks, isinstance and pickling as they are. So do attentions whose q, k and v
    become one product, for which the three weights become views of one tensor (``joined``). ``experts`` "nvfp4" or
    "mxfp4" packs expert weights that transformers runs by its ExpertsInterface, gated by SwiGLU or GPT-OSS' gate
    (Mixtral, Qwen, GLM, MiniMax, DeepSeek and others), to FP4, deletes the original parameters and sets the experts
    implementation to "attnkit"; a device without quantisation kernels takes a model that was packed on the CPU and then
    moved. ``activations`` "nvfp4", "mxfp4" or "mxfp8": the experts round what they multiply the weights with to that
    format, inside fp4_moe; "none" leaves it in the model dtype.

    ``model.attnkit_swapped`` says what was done: class name of the original to number of modules. A second call with
    the same arguments changes nothing. Nothing is changed if anything is refused. ``model.attnkit_restore()`` takes it
    back, unless experts were packed. ``save_pretrained`` of a packed model writes what ``from_pretrained`` loads with
    the same bits (``saving``), or refuses.

    Raises:
        TypeError: ``model`` is not a transformers PreTrainedModel.
        ValueError: an unknown format for experts or activations, activations without experts, a model without
            experts, or one packed to the other format.
        UnsupportedError: a variant of a module for which there is no op, or a model whose attention does not go
            through transformers' AttentionInterface.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"attnkit_model: model is {type(model).__name__}, accepted: a transformers PreTrainedModel")
    if experts is None and activations != "none":
        raise ValueError(f"attnkit_model: activations is {activations!r}, accepted without experts: 'none'")
    found = [] if experts is None else experts_of(model, "attnkit_model", experts, activations)
    for module in found:
        if packed_format(module) not in (None, experts):
            raise ValueError(f"attnkit_model: experts are packed to {packed_format(module)} already, not {experts}")
    swaps = [(module, SWAPS[type(module)]) for module in model.modules() if type(module) in SWAPS]
    for module, swapped in swaps:
        if "forward" in vars(module):
            raise UnsupportedError(
                f"attnkit_model: a {type(module).__name__} has a forward of its own, which would hide the replaced one"
                " (accelerate sets one for device_map and offloading); accepted: a model that is not dispatched yet"
            )
        if (check := getattr(swapped, "attnkit_check", None)) is not None:
            check(module)
    before = _implementations(model)
    model.set_attn_implementation("attnkit")
    if model.config._attn_implementation != "attnkit":
        _set_implementations(model, before)
        raise UnsupportedError(
            f"attnkit_model: {type(model).__name__} does not choose its attention through AttentionInterface"
        )
    if getattr(model, "attnkit_before", None) is None:
        model.attnkit_before = before
    for module, swapped in swaps:
        module.__class__ = swapped
    _join(model)
    fresh = [module for module in found if packed_format(module) is None]
    for module in fresh:
        assert experts is not None
        pack(module, experts)
    if fresh:
        model.attnkit_packed = experts
        _savable(model)
    for module in found:
        module.attnkit_activations = activations
    if found:
        model.set_experts_implementation("attnkit")
        # A forward of the experts' own hands tokens to other ranks, with indices as transformers has them.
        straight = not any("forward" in vars(module) or module._is_expert_parallel for module in found)
        for module in model.modules():
            if straight and type(module) in routers.SWAPS.values():
                module.attnkit_feeds = found[0].config
    done = Counter(was.__name__ for m in model.modules() if (was := original(m)) is not None)
    done.update(type(m).__name__ for m in model.modules() if packed_format(m) is not None)
    model.attnkit_swapped = dict(done)
    return model


def original(module: Any) -> type | None:
    """The class that ``module`` had before attnkit_model gave it another one; None if it has its own."""
    return module.attnkit_original if isinstance(module, joined.Joined) else _ORIGINAL.get(type(module))


def _join(model: PreTrainedModel) -> None:
    """Let attentions have one product for q, k and v; those with a forward of their own are left alone."""
    for module in model.modules():
        if "forward" not in vars(module) and joined.joinable(module):
            module.__class__ = joined.joined_class(type(module))
        if isinstance(module, joined.Joined) and module.attnkit_weight is None:
            joined.join(module)


def _savable(model: PreTrainedModel) -> None:
    """Let ``save_pretrained`` of a model, whose experts have just been packed, write what ``from_pretrained`` loads.

    What no layout is known for is refused by ``save_pretrained``: a model of which other layers are quantised by
    somebody else, and NVFP4 experts that Model Optimizer would write with another scale.
    """
    packed = [module for module in model.modules() if packed_format(module) is not None]
    quantizer: Any
    if packed_format(packed[0]) == "mxfp4":
        names = saving.unquantised(model, patterns=True)
        quantizer = Mxfp4Experts(Mxfp4Config(modules_to_not_convert=names), pre_quantized=True)
    else:
        # vLLM finds q_proj, k_proj and v_proj of a joined projection by whole names alone.
        names = saving.unquantised(model, patterns=False)
        quantizer = ModelOptExperts(ModelOptConfig("NVFP4", names, group_size=16), pre_quantized=True)
    quantizer.adopt(packed)
    if (other := getattr(model, "hf_quantizer", None)) is not None:
        method = other.quantization_config.quant_method
        quantizer.refusal = (
            f"{type(model).__name__} is quantised by {getattr(method, 'value', method)}, too, accepted: packed experts"
            " in a model that is not quantised otherwise"
        )
    saving.mark(model, quantizer)


def attnkit_restore(model: PreTrainedModel) -> PreTrainedModel:
    """Take back what attnkit_model did to ``model``: classes of modules, weights that share a tensor, and the attention
    implementations that the model and its parts had. Works in place and returns ``model``. It is a method of every
    PreTrainedModel once the integration is imported.

    Raises:
        ValueError: attnkit_model has not been given ``model``, or not since it was restored.
        UnsupportedError: attnkit_model packed experts, whose own weights are gone; ``model`` is shared among processes;
            or a replaced module was given a forward of its own since. Nothing is changed then.
    """
    before = getattr(model, "attnkit_before", None)
    if before is None:
        raise ValueError(
            f"attnkit_restore: {type(model).__name__} is as it was, accepted: one that attnkit_model has been given"
        )
    if (packed := getattr(model, "attnkit_packed", None)) is not None:
        raise UnsupportedError(
            f"attnkit_restore: attnkit_model packed the experts to {packed} and deleted their weights, accepted:"
            " experts that it did not pack; load this model again"
        )
    swapped = [module for module in model.modules() if original(module) is not None]
    for module in model.modules():
        if getattr(module, "attnkit_group", None) is not None:
            raise UnsupportedError("attnkit_restore: the model is shared among processes, accepted: a whole one")
    for module in swapped:
        if "forward" in vars(module):
            raise UnsupportedError(
                f"attnkit_restore: a {type(module).__name__} has a forward of its own, which calls the replaced one"
                " (accelerate sets one for device_map and offloading); accepted: a model without; take it off first"
                " (accelerate.hooks.remove_hook_from_submodules)"
            )
    for module in swapped:
        if isinstance(module, joined.Joined):
            joined.separate(module)
        module.__class__ = original(module)
    for module in model.modules():
        for name in ("attnkit_feeds", "attnkit_activations"):
            vars(module).pop(name, None)
    _set_implementations(model, before)
    del model.attnkit_before, model.attnkit_swapped
    return model


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of ``model``, of the models in it and of their parts, in an order that stays."""
    found: dict[int, PreTrainedConfig] = {}

    def walk(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
        yield config
        for name in config.sub_configs:
            if isinstance(part := getattr(config, name, None), PreTrainedConfig):
                yield from walk(part)

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found |= {id(config): config for config in walk(module.config) if id(config) not in found}
    return list(found.values())


def _implementations(model: PreTrainedModel) -> list[Any]:
    return [config._attn_implementation_internal for config in _configs(model)]


def _set_implementations(model: PreTrainedModel, implementations: list[Any]) -> None:
    """What ``_implementations`` returned. Past set_attn_implementation, which has no word for each of several parts."""
    for config, implementation in zip(_configs(model), implementations, strict=True):
        config._attn_implementation_internal = implementation
