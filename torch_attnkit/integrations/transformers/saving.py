"""How a model with packed experts is saved: in the layouts that checkpoints of such experts are published in.

``save_pretrained`` asks a model's ``hf_quantizer`` for what it writes, and its config for the quantisation. Both are
given to a model when its experts are packed (``mark``), and they are those that ``from_pretrained`` finds again by
the config: ``mxfp4`` writes blocks and scales under the experts' own names, as GPT-OSS is published, and ``modelopt``
each expert by itself, as Model Optimizer exports them. What was loaded packed is saved in the same way. Bits stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

from torch_attnkit.core import UnsupportedError

from .experts import WEIGHTS, packed_format

PARTS = ("packed", "scale", "global")


def mark(model: PreTrainedModel, quantizer: Any) -> None:
    """Let ``quantizer`` say what is written of ``model``, and of the models in it, which may be saved by themselves."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and any(packed_format(module) for module in part.modules()):
            part.hf_quantizer = quantizer
            part.config.quantization_config = quantizer.quantization_config


def unquantised(model: PreTrainedModel, *, patterns: bool) -> list[str]:
    """The modules with matrices besides packed experts, as configs of checkpoints list them: by the names that they
    have in the files. ``patterns`` puts ``*`` for the number of a layer."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # as when transformers saves
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
    renamings = [c.reverse_transform() for c in reversed(conversions) if isinstance(c, WeightRenaming)]
    found = set()
    for name, module in model.named_modules():
        if packed_format(module) is None and any(p.ndim >= 2 for p in module.parameters(recurse=False)):
            saved = apply_renamings(f"{name}.weight", renamings).removesuffix(".weight")
            found.add(re.sub(r"\.\d+(?=\.|$)", ".*", saved) if patterns else saved)
    return sorted(found)


def published(
    model: PreTrainedModel, what: str, publish: Callable[[str, Any], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The state_dict of ``model``, with ``publish(name, module)`` in place of the buffers of packed experts.

    Raises:
        UnsupportedError: experts of which this process has a part.
    """
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, module in model.named_modules():
        if packed_format(module) is None:
            continue
        if getattr(module, "attnkit_group", None) is not None or module._is_expert_parallel:
            raise UnsupportedError(
                f"{what}: {name} is shared among processes, accepted: whole models; save before it is shared"
            )
        for weight in WEIGHTS:
            for part in PARTS:
                state.pop(f"{name}.{weight}_{part}", None)
        state.update(publish(name, module))
    return state


def refuse(what: str, message: str | None) -> None:
    """Called by what transformers asks first of all, so that nothing has been written."""
    if message is not None:
        raise UnsupportedError(f"{what}: {message}")


def names_in(files: list[str] | None) -> list[str] | None:
    """The names of the tensors in the files of a checkpoint; None if they are no safetensors."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return None
    found: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found += opened.keys()
    return found


def forget(model: PreTrainedModel, ours: list[Any]) -> None:
    """Leave ``ours`` out of the conversions that transformers reverts when it saves: ``published`` has done it."""
    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        model._weight_conversions = [c for c in known if not any(c is own for own in ours)]
