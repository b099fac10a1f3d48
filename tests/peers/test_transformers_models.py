"""attn_implementation="attnkit" on tiny models of many families: as eager has it, or refused with words.

What must not be is a third: a model that takes the mask for something else and is wrong without a word.
``tests/peers/families.py`` asks, and docs/models.md says what came of it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.peers.families import AGREE, attempt, build, candidates, forward, ours, padding, page
from tests.peers.tiny_models import tokens
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, masks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def _same(theirs: torch.Tensor, got: torch.Tensor) -> None:
    assert theirs.shape == got.shape and bool(theirs.isfinite().all())
    assert float((theirs - got).abs().max()) <= AGREE * float(theirs.abs().max())


def _sections() -> dict[str, str]:
    """The parts of docs/models.md by their headings."""
    return dict(part.split("\n", 1) for part in PAGE.read_text("utf-8").split("\n## ")[1:])


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", candidates())
def test_a_class_is_as_eager_has_it_or_refused_with_a_way_out(name):
    tried = attempt(name)
    assert not tried.wrong
    for message in (*tried.cases.values(), tried.experts):
        if message.startswith("refused"):
            assert re.search("attn_implementation='eager'|leave experts=None|call attnkit_model", message)
    names = {heading: re.findall(r"\w+", text) for heading, text in _sections().items()}
    sections = ["Not tried"]
    if tried.cases:
        equal = "equal" in tried.cases.values()
        sections = ["Run on the ops" if tried.ops else "Attention that no setting of transformers reaches, or none"]
        sections = sections if equal else ["Refused altogether"]
    assert [heading for heading, found in names.items() if name in found and heading != "The words"] == sections


@pytest.mark.proof
@pytest.mark.seconds(900)
def test_the_page_is_what_trying_gives():
    found = page([attempt(name) for name in candidates()])
    assert found == PAGE.read_text("utf-8"), "run: python -m tests.peers.families --write docs/models.md"
    asked, wrong = (int(re.search(rf"(\d+)\s+{what}", found)[1]) for what in (r"classes\s+answered", r"were\s+wrong"))
    assert asked >= 60 and wrong == 0


@pytest.mark.parametrize("fault", ["no padding", "no causality", "a window too wide", "a window too narrow"])
def test_a_wrong_mask_is_found(fault, monkeypatch):
    """What the families are asked tells a mask from one that is off by a key."""
    described = masks.described

    def broken(mask):
        found = described(mask)
        layout, start = found.layout, found.start
        if fault == "no padding":
            start = None
        elif fault == "no causality":
            layout = layout._replace(causal=False, window=-1)
        elif layout.window >= 0:
            layout = layout._replace(window=layout.window + (1 if fault == "a window too wide" else -1))
        return masks.Descriptor(layout, start, found.length, found.cu_seqlens, found.model)

    monkeypatch.setattr(masks, "described", broken)
    monkeypatch.setattr("torch_attnkit.integrations.transformers.attention._agree", lambda *_: None)
    wrong = attempt("LlamaForCausalLM" if fault == "no padding" else "MistralForCausalLM").wrong  # windowed is Mistral
    expected = {
        "no padding": {"padded prompt", "padded generation", "static cache"},
        "no causality": {"prompt", "padded prompt", "prompt behind a cache", "packed sequences"},
    }.get(fault, {"prompt", "generation", "static cache", "prompt behind a cache"})
    assert expected <= wrong.keys()


def test_a_prefix_that_sees_itself_both_ways_is_refused():
    """Prefix-LM masks: images and prompts of PaliGemma and Gemma 3, whose tokens also see later ones of their block."""
    for name, types in (("PaliGemmaForConditionalGeneration", 0), ("Gemma3ForConditionalGeneration", 1)):
        model = ours(name)
        ids = tokens(1, 8)
        token_types = torch.zeros_like(ids)
        token_types[:, :4] = types
        with pytest.raises(
            UnsupportedError, match=r"attnkit mask: the pattern .* is not supported; accepted: .*'eager'"
        ):
            model(ids, token_type_ids=token_types)


@pytest.mark.parametrize("name", ["BloomForCausalLM", "CodeGenForCausalLM", "MptForCausalLM", "XGLMForCausalLM"])
def test_generation_is_refused_too(name):
    """Also behind a static cache, for which generate() makes the mask itself."""
    for cache_implementation in ("dynamic", "static"):
        with pytest.raises(UnsupportedError, match=r"takes the mask for a tensor"):
            ours(name).generate(tokens(2, 12), max_new_tokens=2, cache_implementation=cache_implementation)


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "GPTNeoForCausalLM", "FalconForCausalLM"])
def test_a_model_with_attention_classes_of_its_own_is_named(name):
    with pytest.raises(UnsupportedError, match=r"(gptj|gpt_neo|falcon) chooses from .* of its own.*'eager'$"):
        ours(name)
    with pytest.raises(UnsupportedError, match=f"{name} does not choose its attention through AttentionInterface"):
        attnkit_model(build(name, "eager"))


def test_a_recurrence_that_reads_what_padding_was_given_is_refused_behind_left_padding():
    """Right padding, and no padding, is as eager has it."""
    name = "RecurrentGemmaForCausalLM"
    eager, got = build(name, "eager"), ours(name)
    left = padding(eager)
    for mask in (None, torch.ones(2, 12), left.flip(1)):
        _same(forward(eager, mask), forward(got, mask))
    with pytest.raises(UnsupportedError, match=r"hides the first tokens .* recurrent_gemma read, accepted: .*'eager'"):
        forward(got, left)
