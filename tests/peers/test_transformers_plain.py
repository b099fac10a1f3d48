"""Modules that attnkit_model reads past their forward, where something stands in for the module: then it is called.

``offloaded`` does what accelerate's ``cpu_offload`` does, and accelerate itself is asked where it is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import DynamicCache

import torch_attnkit
from tests.peers.tiny_models import build, frozen, modules, tokens, with_our_routers
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4
from torch_attnkit.integrations.transformers.plain import holds_plain, is_plain

AGREE = 1e-10  # of the largest logit, in float64
FAMILIES = ("deepseek_v3", "deepseek_v4", "gpt_oss")  # the Qwen hybrids read a convolution's weight past it themselves
# What runs on weights of modules that are not called.
READERS = {"grouped_output_projection", "indexer_scores", "indexer_topk"}


def offloaded(model: nn.Module) -> nn.Module:
    """``model`` with the parameters of each module there while it runs, and on the meta device else."""
    for module in model.modules():
        held = dict(module.named_parameters(recurse=False))
        if held:
            module.forward = _with_weights(module, held, module.forward)
            _hold(module, {name: nn.Parameter(p.to("meta"), p.requires_grad) for name, p in held.items()})
    return model


def _hold(module: nn.Module, held: dict[str, nn.Parameter]) -> None:
    for name, parameter in held.items():
        module._parameters[name] = parameter


def _with_weights(module: nn.Module, held: dict[str, nn.Parameter], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        parameters = dict(module.named_parameters(recurse=False))
        _hold(module, held)
        try:
            return forward(*args, **kwargs)
        finally:
            _hold(module, parameters)

    return run


def steps(model: Any, length: int = 13, new: int = 6) -> torch.Tensor:
    """Logits (2, new, V) of the tokens that follow a prompt, whose decode steps complete compressed entries."""
    out = model.generate(
        tokens(2, length), do_sample=False, max_new_tokens=new, output_logits=True, return_dict_in_generate=True
    )
    return torch.stack(out.logits, 1)


def agree(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.shape == ours.shape and bool(theirs.isfinite().all())
    assert float((theirs - ours).abs().max()) <= AGREE * float(theirs.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_offloaded_model_generates_what_it_did(family):
    model = frozen(attnkit_model(build(family)).double())
    expected = steps(model)
    with torch_attnkit.record() as recorded:
        agree(expected, steps(offloaded(model)))
    assert not READERS & {op for op, _ in recorded.calls}


def test_accelerate_offloads_a_model_that_attnkit_model_has_been_given():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    for family in ("deepseek_v3", "deepseek_v4"):
        model = frozen(attnkit_model(build(family)).double())
        expected = steps(model)
        agree(expected, steps(accelerate.cpu_offload(model, execution_device=torch.device("cpu"))))


class Coded(torch.Tensor):
    """A weight that is not there as numbers: F.linear and products know it, whoever reads it otherwise fails."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Coded:
        coded = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        coded.values = values
        return coded

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (F.linear, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__):
            args = [a.values if isinstance(a, cls) else a for a in args]
            return function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(f"{function} reads a coded weight")


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("deepseek_v3", "kv_b_proj"),
        ("gpt_oss", "mlp.router"),
        ("qwen3_next", "mlp.gate"),
        ("qwen3_next", "linear_attn.norm"),
        ("deepseek_v4", "mlp.gate"),
    ],
)
def test_weights_that_are_subclasses_of_tensors_run_by_their_modules(family, part):
    model = frozen(attnkit_model(build(family)).double())
    expected = steps(model)
    found = [m for name, m in model.named_modules() if name.endswith(part)]
    for module in found:
        module.weight = nn.Parameter(Coded(module.weight.detach()), requires_grad=False)
    assert found and not any(holds_plain(m) for m in found)
    got = steps(model)
    # The model's own routers and norms count in float32.
    limit = AGREE if part == "kv_b_proj" else 1e-5
    assert float((expected - got).abs().max()) <= limit * float(expected.abs().max())


def test_int8_weights_of_torchao_decode_as_under_eager_attention():
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    logits = []
    for prepare in (lambda model: model, attnkit_model):
        model = frozen(build("deepseek_v3"))
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
        logits.append(steps(prepare(model)))
    assert type(modules(model, "DeepseekV3Attention")[0].kv_b_proj.weight.data) is not torch.Tensor
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5 * float(logits[0].abs().max())


@pytest.mark.parametrize("part", ["compressor", "compressor.indexer", "compressor.indexer.scorer", "o_a_proj"])
def test_a_hooked_part_of_deepseek_v4_is_called_at_every_step(part):
    ids, logits, seen = tokens(2, 37), [], []
    for model in (with_our_routers(build("deepseek_v4")), attnkit_model(build("deepseek_v4"))):
        frozen(model.double())
        called: list[str] = []
        for name, module in model.named_modules():
            if name.endswith(f"self_attn.{part}"):
                module.register_forward_hook(lambda *_, name=name, called=called: called.append(name))
        filled = DynamicCache(config=model.config)
        cuts = ((0, 2), (2, 13), (13, 14), (14, 37))
        logits.append(torch.cat([model(ids[:, a:b], past_key_values=filled).logits for a, b in cuts], 1))
        logits.append(steps(model, 7, 9))
        seen.append(called)
    agree(logits[0], logits[2])
    agree(logits[1], logits[3])
    assert seen[0] == seen[1] and seen[0]


def _meta(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.to("meta"))


STANDS_IN: dict[str, Callable[[nn.Linear], Any]] = {
    "a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "a hook of the gradient": lambda m: m.register_full_backward_hook(lambda *_: None),
    "a forward": lambda m: setattr(m, "forward", m.forward),
    "a parametrisation": lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()),
    "a subclass": lambda m: setattr(m, "weight", nn.Parameter(Coded(m.weight.detach()), requires_grad=False)),
    "meta": _meta,
}


@pytest.mark.parametrize("what", STANDS_IN)
def test_what_stands_in_for_a_module_is_noticed(what):
    module = nn.Linear(4, 4)
    assert is_plain(module, nn.Linear) and not is_plain(module, nn.Identity)
    STANDS_IN[what](module)
    assert not is_plain(module, nn.Linear)


def test_a_hook_of_all_modules_is_noticed():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_plain(nn.Linear(4, 4), nn.Linear)
    finally:
        handle.remove()
    assert is_plain(nn.Linear(4, 4), nn.Linear)


def test_a_class_that_was_made_of_another_is_noticed():
    assert not is_plain(nn.Bilinear(2, 2, 2), nn.Linear)
    assert not is_plain(type("Adapted", (nn.Linear,), {})(2, 2), nn.Linear)


# Packing and cutting read weights once.


class _Adapted(nn.Module):
    """What PEFT's target_parameters put around experts: the module itself as ``base_layer``."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def _wrap(experts: nn.Module, block: nn.Module) -> None:
    block.experts = _Adapted(experts)


EXPERTS_THAT_ARE_NOT_PLAIN: dict[str, tuple[Callable[[nn.Module, nn.Module], Any], str]] = {
    "an adapter": (_wrap, "base_layer is wrapped by a _Adapted, which adds to its weights, accepted: plain experts"),
    "a parametrisation": (
        lambda m, _: parametrize.register_parametrization(m, "down_proj", nn.Identity()),
        "has parametrisations, accepted: plain weights",
    ),
    "a subclass": (
        lambda m, _: setattr(m, "down_proj", nn.Parameter(Coded(m.down_proj.detach()), requires_grad=False)),
        "down_proj is a Coded of torch.float32, accepted: plain floating-point weights",
    ),
    "meta": (lambda m, _: m.to("meta"), "gate_up_proj is on the meta device, accepted: plain .* after packing"),
    "another dtype": (
        lambda m, _: setattr(m, "down_proj", nn.Parameter(m.down_proj.detach().to(torch.float8_e4m3fn), False)),
        r"down_proj is a Parameter of torch.float8_e4m3fn, accepted: plain floating-point weights",
    ),
}


@pytest.mark.parametrize("what", EXPERTS_THAT_ARE_NOT_PLAIN)
@pytest.mark.parametrize("op", ["attnkit_model", "round_experts_to_fp4"])
def test_experts_that_are_not_plain_are_not_packed(what, op):
    model = build("gpt_oss")
    stand_in, message = EXPERTS_THAT_ARE_NOT_PLAIN[what]
    block = model.model.layers[1].mlp
    stand_in(block.experts, block)
    with pytest.raises(UnsupportedError, match=rf"{op}: model\.layers\.1\.mlp\.experts.*{message}"):
        attnkit_model(model, experts="mxfp4") if op == "attnkit_model" else round_experts_to_fp4(model, "mxfp4")
    assert model.config._attn_implementation == "eager" and not modules(model, "Attnkit")


def test_lora_on_experts_is_refused_and_merged_experts_are_packed():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    adapted = peft.get_peft_model(build("gpt_oss"), config)
    with pytest.raises(UnsupportedError, match="is wrapped by a ParamWrapper.*merge_and_unload"):
        attnkit_model(adapted.get_base_model(), experts="mxfp4")
    assert attnkit_model(adapted.merge_and_unload(), experts="mxfp4").attnkit_swapped["GptOssExperts"] == 2
