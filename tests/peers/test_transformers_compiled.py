"""Models under torch.compile over a static cache: a prompt and decode steps, each one graph, as without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from tests.peers import families, tiny_models
from tests.peers.tiny_models import frozen, tokens
from torch_attnkit.integrations.transformers import attnkit_model

# Experts that are packed where there are any: the models' own look at the data, which no graph can.
MODELS = {
    "gpt_oss": "mxfp4",
    "deepseek_v3": "mxfp4",
    "gemma3": None,
    **{name: None for name in ("llama", "mistral", "gemma2", "Qwen3ForCausalLM")},
    "Qwen3MoeForCausalLM": "mxfp4",
    "qwen3_5": None,
    "qwen3_next": "mxfp4",
}
_OFTEN = {("gpt_oss", False), ("deepseek_v3", False), ("gemma3", True)}
_CASES = [(name, masked) for name in MODELS for masked in (False, True)]


def build(name: str) -> Any:
    model = tiny_models.build(name) if name[0].islower() else families.build(name, "eager")
    return frozen(attnkit_model(model, experts=MODELS[name]))


def _steps(model: Any, call: Any, masked: bool, batch: int = 2) -> list[torch.Tensor]:
    """Logits of 12 tokens and of three that follow, one by one; a window of 8 is full by then."""
    ids, cache, found = tokens(batch, 15), StaticCache(model.config, max_cache_len=32), []
    for a, b in ((0, 12), (12, 13), (13, 14), (14, 15)):
        mask = dict(attention_mask=torch.ones(batch, b, dtype=torch.long)) if masked else {}
        with torch.no_grad():
            found.append(call(ids[:, a:b], past_key_values=cache, **mask).logits)
    return found


@pytest.mark.parametrize(
    ("name", "masked"), [c if c in _OFTEN else pytest.param(*c, marks=pytest.mark.proof) for c in _CASES]
)
def test_a_prompt_and_a_decode_step_over_a_static_cache_are_one_graph_each(name, masked):
    torch._dynamo.reset()
    model = build(name)
    counter = CompileCounterWithBackend("eager")
    got = _steps(model, torch.compile(model, backend=counter, fullgraph=True), masked)
    for expected, found in zip(_steps(model, model, masked), got, strict=True):
        assert torch.equal(expected, found)
    # A static window of transformers counts its tokens on the host, and a 2-D mask grows: both are traced once more.
    assert counter.frame_count <= 3


@pytest.mark.proof
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_decode_step_on_inductor_is_as_without(name):
    torch._dynamo.reset()
    model = build(name)
    got = _steps(model, torch.compile(model, fullgraph=True), False)
    for expected, found in zip(_steps(model, model, False), got, strict=True):
        assert float((expected - found).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.proof
@pytest.mark.parametrize("name", ["gpt_oss", "llama", "Qwen3ForCausalLM"])
def test_a_step_in_bfloat16_is_as_close_to_float32_as_without_a_compiler(name):
    torch._dynamo.reset()
    model = build(name)
    exact = _steps(model, model, False, 1)
    model.bfloat16()
    pairs = zip(exact, _steps(model, model, False, 1), strict=True)
    plain = [float((a - b.float()).abs().mean()) for a, b in pairs]
    pairs = zip(exact, _steps(model, torch.compile(model, fullgraph=True), False, 1), strict=True)
    ours = [float((a - b.float()).abs().mean()) for a, b in pairs]
    assert sum(ours[1:]) <= 1.25 * sum(plain[1:])
