"""The experts function "attnkit": expert weights packed to FP4, run by fp4_moe.

Packing replaces an experts module's ``gate_up_proj`` and ``down_proj`` parameters by buffers of the same name with
``_packed`` (E2M1 pairs), ``_scale`` and, for NVFP4, ``_global`` behind it. The parameters are deleted: their memory is
the point, and code that would still read them fails instead of computing with something else. The buffers are
persistent, so a state_dict is whole and loads into a model packed the same way; save_pretrained writes the layouts of
published checkpoints (``saving``). Biases stay parameters.

NVFP4 scales are per expert and rounded down to a power of two: every weight read back has at most six significant bits
and is exact in bfloat16, so that rounded ordinary parameters (round_experts_to_fp4) hold the same numbers. They are
kept as the bits of a float32, which ``model.to(dtype)`` leaves alone. MXFP4 is quantised with "ceil", under which
weights that were MXFP4 before (GPT-OSS as published) come out as they went in.

With ``attnkit_group`` (shard_model) a module holds the experts of one process of that group, and the processes add up.

Activations stay in the model dtype, or fp4_moe quantises them itself: ``attnkit_activations`` of a packed module is the
op's argument of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.activations import SiLUActivation

from torch_attnkit.core import UnsupportedError
from torch_attnkit.formats import nvfp4
from torch_attnkit.integrations import distributed

from .plain import is_plain_tensor

ops = torch.ops.attnkit
BLOCK = {"nvfp4": 16, "mxfp4": 32}
ACTIVATIONS = {"none": 1, "nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # numbers under one scale
WEIGHTS = ("gate_up_proj", "down_proj")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Gate(NamedTuple):
    """What fp4_moe computes of gate and up: its ``swiglu``, and which attributes of the module are alpha and limit."""

    swiglu: str
    alpha: str | None = None
    limit: str | None = None


# Every experts class of transformers has a method that multiplies gate and up; a subclass that keeps it computes the
# same. Most have the library's own, act_fn(gate) * up.
_GATES = {
    "_default_apply_gate": _Gate("silu"),
    "BeamExperts._apply_gate": _Gate("silu"),
    "DeepseekV4Experts._apply_gate": _Gate("silu", limit="limit"),
    "Glm5NextTextExperts._apply_gate": _Gate("silu", limit="swiglu_limit"),
    "GptOssExperts._apply_gate": _Gate("gptoss", alpha="alpha", limit="limit"),
    "HYV4Experts._apply_gate": _Gate("silu", limit="swiglu_limit"),
    "MiniMaxM3VLExperts._apply_gate": _Gate("gptoss", alpha="swiglu_alpha", limit="swiglu_limit"),
    "OpenAIPrivacyFilterExperts._apply_gate": _Gate("gptoss", alpha="alpha", limit="limit"),
}


def _gate(module: nn.Module) -> _Gate | None:
    """What ``module`` computes between its two products, if fp4_moe has it."""
    method = getattr(type(module), "_apply_gate", None)
    if method is None or not method.__module__.startswith("transformers."):
        return None
    return _GATES.get(method.__qualname__)


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Packed experts on hidden_states (Tq, N), indices and weights (Tq, K): (Tq, N) in the dtype of hidden_states.

    Raises:
        UnsupportedError: ``module`` has not been packed.
    """
    format = packed_format(module)
    if format is None:
        way = "model.set_experts_implementation('eager')"
        if runs(module):
            way = f"call attnkit_model(model, experts='mxfp4') or experts='nvfp4', or {way}"
        raise UnsupportedError(
            f"attnkit experts: {type(module).__name__} holds ordinary weights, accepted: weights packed to FP4; {way}"
        )
    if module._is_expert_parallel:  # experts of other ranks carry the number behind the last expert
        top_k_index = top_k_index.masked_fill(top_k_index >= module.num_experts, -1)
    bits = [getattr(module, f"{name}_global", None) for name in WEIGHTS]
    gate = module.attnkit_gate
    group = getattr(module, "attnkit_group", None)
    run = ops.fp4_moe if group is None else partial(distributed.ep_moe, group=group)
    return run(
        hidden_states,
        top_k_weights.float(),
        top_k_index,
        module.gate_up_proj_packed,
        module.gate_up_proj_scale,
        module.down_proj_packed,
        module.down_proj_scale,
        *(None if b is None else b.view(torch.float32) for b in bits),
        module.gate_up_proj_bias if module.has_bias else None,
        module.down_proj_bias if module.has_bias else None,
        format=format,
        activations=getattr(module, "attnkit_activations", "none"),
        swiglu=gate.swiglu,
        alpha=1.0 if gate.alpha is None else float(getattr(module, gate.alpha)),
        limit=None if gate.limit is None else getattr(module, gate.limit),
        interleaved=not module.is_concatenated,
    )


def packed_format(module: nn.Module) -> str | None:
    """ "nvfp4" or "mxfp4" for a packed experts module, None for any other."""
    if getattr(module, "gate_up_proj_packed", None) is None:
        return None
    return "mxfp4" if getattr(module, "gate_up_proj_global", None) is None else "nvfp4"


def experts_of(model: nn.Module, op: str, format: str, activations: str = "none") -> list[Any]:
    """The experts modules of ``model``, all of which can be quantised to ``format`` and run with ``activations``.

    Raises:
        ValueError: an unknown format, no experts module, or a module that is packed to the other format.
        UnsupportedError: experts without a gate, a gate, an activation or sizes that fp4_moe has nothing for, or
            weights that are adapted, quantised, sharded or offloaded.
    """
    for what, value, known in (("format", format, BLOCK), ("activations", activations, ACTIVATIONS)):
        if value not in known:
            raise ValueError(f"{op}: {what} is {value!r}, accepted: {', '.join(map(repr, known))}")
    found = []
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        check_computes(module, f"{op}: {name} ({type(module).__name__})")
        _check_readable(model, name, module, f"{op}: {name}")
        _check_quantizable(module, f"{op}: {name}", format, activations)
        found.append(module)
    if not found:
        raise ValueError(
            f"{op}: {type(model).__name__} has no experts modules, accepted: models whose experts go through"
            " transformers' ExpertsInterface"
        )
    return found


def is_experts(module: nn.Module) -> bool:
    """Whether transformers runs ``module`` by its ExpertsInterface, which sets these."""
    return hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")


def runs(module: nn.Module) -> bool:
    """Whether ``module`` holds experts that fp4_moe computes."""
    if not is_experts(module) or _gate(module) is None:
        return False
    return bool(module.has_gate) and not module.has_post_expert_norm


def check_computes(module: Any, what: str, way: str = "; leave experts=None, and they stay the model's own") -> None:
    """Two products with a gate between them that fp4_moe has, and nothing else."""
    for name, accepted in (("has_gate", True), ("has_post_expert_norm", False)):
        if getattr(module, name) != accepted:
            raise UnsupportedError(f"{what}: {name} is {not accepted}, accepted: {accepted}{way}")
    if _gate(module) is None:
        raise UnsupportedError(
            f"{what}: {type(module)._apply_gate.__qualname__} multiplies gate and up, accepted: silu(gate) * up and"
            f" (up + 1) * gate * sigmoid(alpha * gate), with a limit or without{way}"
        )


def _check_readable(model: nn.Module, name: str, module: nn.Module, what: str) -> None:
    """The weights are all that the products read: packing would drop what is added to them in the forward."""
    parent = model.get_submodule(name.rpartition(".")[0])
    if getattr(parent, "base_layer", None) is module:  # where PEFT keeps what it wraps
        raise UnsupportedError(
            f"{what} is wrapped by a {type(parent).__name__}, which adds to its weights, accepted: plain experts; merge"
            " the adapter into them (merge_and_unload), or target no expert weights"
        )
    if parametrize.is_parametrized(module):
        raise UnsupportedError(f"{what} has parametrisations, accepted: plain weights (remove_parametrizations)")
    for weight, tensor in module.named_parameters(recurse=False):
        accepted = "accepted: plain floating-point weights on a device; quantise, shard or offload after packing"
        if not is_plain_tensor(tensor) or tensor.dtype not in _DTYPES:
            found = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} of {tensor.dtype}"
            raise UnsupportedError(f"{what}: {weight} is {found}, {accepted}")


def _check_quantizable(module: nn.Module, what: str, format: str, activations: str) -> None:
    activation = getattr(module, "act_fn", None)  # without one the gate names its function itself
    if activation is not None and not isinstance(activation, nn.SiLU | SiLUActivation):
        raise UnsupportedError(f"{what}: act_fn is {type(activation).__name__}, accepted: silu")
    block = max(BLOCK[format], ACTIVATIONS[activations])
    quantised = format if activations == "none" else f"{format} with activations {activations!r}"
    for name in WEIGHTS:
        if packed_format(module) is None:
            columns = getattr(module, name).shape[1 if module.is_transposed else 2]
        else:
            columns = 2 * getattr(module, f"{name}_packed").shape[2]
        if columns % block:
            raise UnsupportedError(
                f"{what}: {name} contracts {columns} numbers, accepted for {quantised}: multiples of {block}"
            )


def _rows(module: nn.Module, name: str) -> Iterator[torch.Tensor]:
    """The matrices (rows, contracted) of one weight, expert by expert."""
    for weight in getattr(module, name).detach():
        yield weight.t().contiguous() if module.is_transposed else weight


def _global_scale(weight: torch.Tensor) -> torch.Tensor:
    """The largest power of two under which the scales of ``weight`` fit E4M3, float32 0-dim."""
    mantissa, exponent = torch.frexp(nvfp4.global_scale(weight))
    return torch.ldexp(torch.ones_like(mantissa), exponent - 1)


def _quantize(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, ...]:
    """codes (rows, K/2), scale (rows, K/block) and, for NVFP4, global_scale () of one matrix."""
    if format == "mxfp4":
        return ops.mxfp4_quantize(weight)
    scale = _global_scale(weight)
    return (*ops.nvfp4_quantize(weight, scale), scale)


def pack(module: nn.Module, format: str) -> None:
    """Replace the weights of an experts module by their packed form."""
    module.attnkit_gate = _gate(module)  # type: ignore[assignment]  # once: a graph cannot look it up
    for name in WEIGHTS:
        parts = [torch.stack(part) for part in zip(*(_quantize(w, format) for w in _rows(module, name)), strict=True)]
        delattr(module, name)
        module.register_buffer(f"{name}_packed", parts[0])  # (E, rows, K/2)
        module.register_buffer(f"{name}_scale", parts[1])  # (E, rows, K/block)
        if format == "nvfp4":
            module.register_buffer(f"{name}_global", parts[2].view(torch.int32))  # (E,) the bits of a float32


def hollow(module: Any, format: str) -> None:
    """Replace the weights of an experts module by empty buffers of their packed form, on the weights' device.

    For what loads a checkpoint of such weights. The module counts as initialised: the model's own initialisation would
    look for the parameters that are gone.
    """
    for name in WEIGHTS:
        weight = getattr(module, name)
        experts, rows, columns = weight.transpose(1, 2).shape if module.is_transposed else weight.shape
        delattr(module, name)
        for part, width in (("packed", columns // 2), ("scale", columns // BLOCK[format])):
            empty = torch.empty(experts, rows, width, dtype=torch.uint8, device=weight.device)
            module.register_buffer(f"{name}_{part}", empty)
        if format == "nvfp4":
            module.register_buffer(f"{name}_global", torch.empty(experts, dtype=torch.int32, device=weight.device))
    module.attnkit_gate = _gate(module)
    module._is_hf_initialized = True


@torch.no_grad()
def round_experts_to_fp4(model: nn.Module, format: str) -> nn.Module:
    """Round the expert weights of ``model``, in place, to the numbers that packing them to ``format`` would hold.

    They stay ordinary parameters, so that the model's own experts run on what fp4_moe would run on. The numbers are
    exact in bfloat16, float32 and float64; float16 may lack the range. Returns ``model``.

    Raises:
        ValueError: ``format`` is neither "nvfp4" nor "mxfp4", or the model has no experts or packed ones.
        UnsupportedError: an experts module that cannot be packed.
    """
    found = experts_of(model, "round_experts_to_fp4", format)
    if any(packed_format(module) for module in found):
        raise ValueError("round_experts_to_fp4: the experts are packed already, accepted: ordinary weights")
    read = ops.nvfp4_dequantize if format == "nvfp4" else ops.mxfp4_dequantize
    for module in found:
        for name in WEIGHTS:
            weight = getattr(module, name)
            for e, rows in enumerate(_rows(module, name)):
                rounded = read(*_quantize(rows, format), dtype=weight.dtype)  # (rows, K)
                weight[e].copy_(rounded.t() if module.is_transposed else rounded)
    return model
