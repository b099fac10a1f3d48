"""Continuous batching of transformers on our ops: the tokens of a model's own generate() in eager, prompt by prompt."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.peers.tiny_models import build
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import continuous
from torch_attnkit.integrations.transformers.attention import attention

LENGTHS, NEW = (5, 19, 70, 11), 12
# A prompt of 70 comes in three chunks or more, beside others that generate already; pages hold 16 keys, windows 8.
BATCHING = dict(page_size=16, num_blocks=64, max_batch_tokens=24)
PAGED = {"flash_attention_varlen", "flash_attention_paged", "sdpa_decode_paged"}


class Counted:
    """torch.ops.attnkit, and how often which op was asked for. The manager runs the model in a thread of its own, where
    torch_attnkit.record does not see it."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str):
        self.calls[name] += 1
        return getattr(torch.ops.attnkit, name)


@pytest.mark.parametrize(
    "family, ran",
    [
        ("llama", PAGED),
        ("gpt_oss", PAGED),
        pytest.param("gemma2", PAGED, marks=pytest.mark.proof),
        pytest.param("mistral", {"flash_attention_varlen"}, marks=pytest.mark.proof),
    ],
)
def test_a_batch_of_requests_generates_what_each_would_alone(family, ran, monkeypatch: pytest.MonkeyPatch):
    gen = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 120, (n,), generator=gen).tolist() for n in LENGTHS]
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    eager = build(family)
    expected = [eager.generate(torch.tensor([p]), generation_config=greedy)[0, len(p) :].tolist() for p in prompts]
    monkeypatch.setattr(continuous, "ops", counted := Counted())
    found = build(family, "attnkit").generate_batch(
        prompts,
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(**BATCHING),
        progress_bar=False,
    )
    assert [(request.generated_tokens, request.error) for request in found.values()] == [(e, None) for e in expected]
    assert set(counted.calls) == ran


def test_the_block_table_lists_the_pages_that_the_rows_lie_in():
    page, lengths, pages = 4, (9, 4, 1), ((5, 2, 7), (1,), (6,))
    rows = torch.tensor([p[j // page] * page + j % page for n, p in zip(lengths, pages, strict=True) for j in range(n)])
    cu_k = torch.tensor([0, 9, 13, 14], dtype=torch.int32)
    table = continuous._block_table(rows, cu_k, page, max(lengths))
    assert table.dtype == torch.int32 and table.shape == (3, 3)
    for row, used in zip(table.tolist(), pages, strict=True):
        assert tuple(row[: len(used)]) == used


def test_other_implementations_are_chosen_as_before(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(continuous, "_choose", lambda manager, model, switch: asked.append((manager, model, switch)))
    for name in ("sdpa", "attnkit"):
        model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
        continuous.ContinuousBatchingManager.switch_to_cb_friendly_attn("manager", model, False)
        assert asked == [("manager", asked[0][1], False)] and asked[0][1].config._attn_implementation == "sdpa"


def test_a_cache_that_is_not_of_continuous_batching_is_refused():
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(UnsupportedError, match="cache is a str, accepted: the PagedAttentionCache of generate_batch"):
        attention(SimpleNamespace(is_causal=True), q, q, q, None, cache="given")
