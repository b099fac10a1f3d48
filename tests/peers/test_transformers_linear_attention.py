"""Gated DeltaNet layers of transformers: prompts on gated_delta_rule, decode steps on gated_delta_step."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import torch_attnkit
from tests.peers.tiny_models import build, frozen, modules, tokens
from tests.targets import needs, on
from torch_attnkit import warmup
from torch_attnkit.integrations.transformers import attnkit_model, linear_attention
from torch_attnkit.served import models

LAYERS, NEW = 3, 8
families = pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])


def pair(family: str) -> tuple[Any, Any]:
    """The model as it is with eager attention, and as attnkit_model has it."""
    return frozen(build(family)), frozen(attnkit_model(build(family)))


def generated(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model.generate(ids, do_sample=False, max_new_tokens=NEW, **kwargs)


def steps(recorded: torch_attnkit.Recorded, name: str = "gated_delta_step") -> int:
    return sum(n for (op, _), n in recorded.calls.items() if op == name)


def states(cache: DynamicCache) -> list[torch.Tensor]:
    return [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]


@families
@pytest.mark.parametrize("how", ["greedy", "padded", "beams"])
def test_tokens_are_those_of_transformers(family, how):
    theirs, ours = pair(family)
    ids = tokens(2, 7)
    mask = torch.ones_like(ids)
    if how == "padded":
        mask[0, :3] = 0
    kwargs = dict(attention_mask=mask, num_beams=3 if how == "beams" else 1)
    with torch_attnkit.record() as recorded:
        found = generated(ours, ids, **kwargs)
    assert torch.equal(found, generated(theirs, ids, **kwargs))
    assert steps(recorded) == LAYERS * (NEW - 1)


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("family", "how"), [("qwen3_5", "greedy"), ("qwen3_5", "padded"), ("qwen3_5", "beams"), ("olmo_hybrid", "padded")]
)
def test_tokens_of_prompts_on_a_device_are_those_of_transformers(family, how):
    """On simulated Metal, in float32."""
    needs("metal")
    theirs, ours = pair(family)
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    if how == "padded":
        mask[0, :3] = 0
    kwargs = dict(attention_mask=mask, num_beams=2 if how == "beams" else 1)
    wanted = generated(theirs, ids, **kwargs)
    with on("metal"), torch_attnkit.record() as recorded:
        found = generated(ours, ids, **kwargs)
    assert torch.equal(found, wanted)
    assert (steps(recorded, "gated_delta_rule"), steps(recorded)) == (LAYERS, LAYERS * (NEW - 1))
    assert steps(recorded, "causal_conv1d") == LAYERS * NEW


@pytest.mark.simulator
@families
def test_a_prompt_in_parts_goes_on_where_the_part_before_ended(family):
    needs("metal")
    theirs, ours = pair(family)
    ids, found = tokens(2, 23), []
    for model, target in ((theirs, "cpu"), (ours, "metal")):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), on(target), torch_attnkit.record() as recorded:
            logits = [model(part, past_key_values=cache).logits for part in ids.split([13, 9, 1], 1)]
        found.append(torch.cat(logits, 1))
    assert (steps(recorded, "gated_delta_rule"), steps(recorded)) == (2 * LAYERS, LAYERS)
    assert all(state.mT.is_contiguous() for state in states(cache))
    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[0].abs().max()


@families
def test_a_layer_in_bfloat16_is_as_close_to_float32_as_transformers_own(family):
    """A layer by itself: whole models with experts differ by what a router chooses."""
    gen = torch.Generator().manual_seed(2)
    x = torch.randn(4, 24, 64, generator=gen)

    @torch.no_grad()
    def rows(model: Any, dtype: torch.dtype) -> torch.Tensor:
        layer, cache = modules(model, "GatedDeltaNet")[0].to(dtype), DynamicCache(config=model.config)
        parts = x.to(dtype).split([16, *[1] * 8], 1)
        return torch.cat([layer(part, cache_params=cache).float() for part in parts][1:], 1)

    theirs, ours = pair(family)
    exact = rows(theirs, torch.float32)
    with torch_attnkit.record() as recorded:
        distance = float((rows(ours, torch.bfloat16) - exact).abs().mean())
    assert steps(recorded) == 8
    assert 0 < distance <= 1.25 * float((rows(theirs, torch.bfloat16) - exact).abs().mean())


@families
def test_the_cache_keeps_its_tensor_and_a_step_changes_it(family):
    _, model = pair(family)
    ids, cache = tokens(2, 9), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :7], past_key_values=cache)
        before = [(state, state.clone()) for state in states(cache)]
        assert len(before) == LAYERS and all(state.mT.is_contiguous() for state, _ in before)
        model(ids[:, 7:8], past_key_values=cache)
    for (state, old), new in zip(before, states(cache), strict=True):
        assert new is state and not torch.equal(new, old)


class _Launches(TorchDispatchMode):
    """Counts the ops of torch that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        if not func.is_view and name not in ("_unsafe_view", "new_empty"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("family", "others"), [("qwen3_5", {"mm": 5}), ("qwen3_next", {"mm": 3, "copy_": 2, "clone": 2})]
)
@torch.no_grad()
def test_the_second_step_of_a_layer_is_three_launches_and_products(family, others):
    """Of Qwen3-Next also what orders the columns of its two products."""
    needs("metal")
    theirs, ours = pair(family)
    x, found = torch.randn(3, 9, 64), []
    last = x[:, 8:].clone()  # of rows that lie apart the library makes batches
    for model, where in ((theirs, "cpu"), (ours, "metal")):
        layer, cache = modules(model, "GatedDeltaNet")[0], DynamicCache(config=model.config)
        with on(where):
            rows = [layer(part, cache_params=cache) for part in (x[:, :7], x[:, 7:8])]
            with _Launches() as launches:
                rows.append(layer(last, cache_params=cache))
        found.append(torch.cat(rows, 1))
    assert launches.counts == others | {"causal_conv1d": 1, "gated_delta_step": 1, "gated_rmsnorm": 1}
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()


def test_slots_of_a_step_stay_where_they_are_whatever_comes_between():
    """A CUDA graph of a step reads them in every replay."""
    cache, device = SimpleNamespace(), torch.device("cpu")
    first = linear_attention._spans(cache, 3, 1, device)
    for batch, length in ((2, 1), (3, 7), (1, 1)):
        offsets, slots = linear_attention._spans(cache, batch, length, device)
        assert offsets.tolist() == [length * b for b in range(batch + 1)] and slots.tolist() == [*range(batch)]
    assert all(a is b for a, b in zip(linear_attention._spans(cache, 3, 1, device), first, strict=True))
    assert linear_attention._spans(None, 3, 1, device)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_of_published_sizes_are_among_those_compiled_ahead(dtype, monkeypatch):
    for function in ("_has_kernel", "has_row"):
        monkeypatch.setattr(linear_attention, function, lambda *_: True)
    model = build("qwen3_5", linear_key_head_dim=128, linear_value_head_dim=128)
    layer = modules(frozen(attnkit_model(model)), "GatedDeltaNet")[0].to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), warmup.asked_by("sm90") as asked:
        cache = DynamicCache(config=model.config)
        layer(torch.zeros(3, 7, 64, dtype=dtype), cache_params=cache)
        layer(torch.zeros(3, 1, 64, dtype=dtype), cache_params=cache)
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    found = {request for request in asked.kernels if request.family == "delta"}
    named, ops = models.named(["qwen3.5-9b"]), ("causal_conv1d", "gated_delta_rule", "gated_delta_step")
    ahead = [warmup.served("sm90", named, (name,), op) for op in ops]
    assert len(found) == 4 and found <= {request for requests in ahead for request in requests}


@pytest.mark.parametrize("why", ["training", "three tokens", "a recorded past", "a hook on the convolution"])
def test_what_the_op_cannot_know_is_done_by_transformers(why):
    theirs, ours = pair("qwen3_next")
    found = []
    if why == "a hook on the convolution":
        for model in (theirs, ours):
            for layer in modules(model, "GatedDeltaNet"):
                layer.conv1d.register_forward_hook(lambda *_: None)
    ids = tokens(2, 10)
    length = 3 if why == "three tokens" else 1
    with torch_attnkit.record() as recorded:
        for model in (theirs, ours):
            cache = DynamicCache(config=model.config)
            with torch.set_grad_enabled(why == "training"):
                model(ids[:, :7], past_key_values=cache)
                if why == "a recorded past":
                    cache.activate_past_recording()
                found.append(model(ids[:, 7 : 7 + length], past_key_values=cache).logits)
    assert steps(recorded) == 0
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()


def test_restoring_brings_the_layers_back():
    model = attnkit_model(build("qwen3_next"))
    model.attnkit_restore()
    with torch_attnkit.record() as recorded:
        generated(frozen(model), tokens(1, 5))
    assert steps(recorded) == 0 and not modules(model, "Attnkit")


@pytest.mark.parametrize("how", ["greedy", "padded", "beams"])
def test_tokens_of_kimi_linear_are_those_of_transformers(how):
    theirs, ours = pair("kimi_linear")
    ids = tokens(2, 7)
    mask = torch.ones_like(ids)
    if how == "padded":
        mask[0, :3] = 0
    kwargs = dict(attention_mask=mask, num_beams=3 if how == "beams" else 1)
    with torch_attnkit.record() as recorded:
        found = generated(ours, ids, **kwargs)
    assert torch.equal(found, generated(theirs, ids, **kwargs))
    assert steps(recorded, "kimi_delta_step") == 4 * (NEW - 1)


@pytest.mark.simulator
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("target", ["cpu", "metal"])
def test_a_step_of_a_layer_of_glm_5_is_that_of_transformers(target, bound):
    needs("metal")
    config = SimpleNamespace(
        hidden_size=64, linear_num_heads=3, linear_head_dim=32, linear_conv_kernel_dim=4, hidden_act="silu",
        rms_norm_eps=1e-6, layer_types=["linear_attention"], linear_lower_bound=bound,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = linear_attention.modeling_glm5_next.Glm5NextTextLinearAttention(config, 0)
        torch.nn.init.normal_(theirs.forget_gate.dt_bias)
        torch.nn.init.uniform_(theirs.forget_gate.A_log, -1, 2)
        x = torch.randn(2, 6, 64)
    ours = copy.deepcopy(theirs)
    ours.__class__ = linear_attention.SWAPS[type(theirs)]
    found = []
    for layer, where in ((theirs, "cpu"), (ours, target)):
        cache = DynamicCache(config=build("kimi_linear").config)
        with torch.no_grad(), on(where), torch_attnkit.record() as recorded:
            found.append(torch.cat([layer(part, cache_params=cache) for part in x.split([3, 1, 1, 1], 1)], 1))
    assert steps(recorded, "kimi_delta_step") == 3
    assert steps(recorded, "causal_conv1d") == (3 if target == "metal" else 0)
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()
