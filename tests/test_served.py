"""Kernels of known models: that sizes between those that are enumerated ask for no others."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_attnkit import warmup
from torch_attnkit.core.target import Target
from torch_attnkit.integrations.vllm import steps
from torch_attnkit.served import calls, models

BF16 = torch.bfloat16
SM90 = Target("sm90")


def kernels(asked: list[calls.Asked], seen: set[tuple[str, torch.dtype]] | None = None) -> set[object]:
    found: set[object] = set()
    for call in asked:
        these = warmup.kernels_of(call, SM90)
        if these is None and seen is not None:
            seen.add((call.op, call.args[1].dtype))
        found |= set(these or ())
    return found


def between(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Other sizes than those that are enumerated, none outside of them."""
    rng = random.Random(seed)

    def some(n: int, least: int, most: int) -> tuple[int, ...]:
        return tuple(sorted(int(2 ** rng.uniform(least, most)) for _ in range(n)))

    monkeypatch.setattr(calls, "BATCHES", some(9, 0, 8))
    monkeypatch.setattr(calls, "CONTEXTS", tuple(n // 16 * 16 for n in some(7, 10, 17)))
    monkeypatch.setattr(calls, "TOKENS", some(12, 0, 14))
    monkeypatch.setattr(calls, "EVERY", some(60, 0, 14))
    monkeypatch.setattr(calls, "ENTRIES", tuple(n // 4 * 4 for n in some(8, 8, 15)))
    monkeypatch.setattr(calls, "BLOCKS", some(4, 0, 12))
    monkeypatch.setattr(calls, "PROMPTS", some(5, 4, 14))
    monkeypatch.setattr(calls, "SEQUENCES", some(3, 0, 6))
    monkeypatch.setattr(calls, "ROWS", some(9, 4, 15))


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(models.Attention(8, 1, 64, (128,), sink=True), id="gpt-oss", marks=pytest.mark.proof),
        pytest.param(models.Attention(16, 4, 128), id="llama"),
        pytest.param(models.Attention(8, 4, 256, (-1,), softcap=50.0), id="gemma-2", marks=pytest.mark.proof),
        pytest.param(models.MODELS["deepseek-v3"].attention, id="deepseek-v3"),
    ],
)
def test_attention_of_other_sizes_asks_for_no_other_kernels(attention, monkeypatch):
    monkeypatch.setattr(calls, "PAGES", (16,))
    refused: set[tuple[str, torch.dtype]] = set()
    known = kernels(list(calls.of_attention(attention, BF16)), refused)
    assert not refused
    between(monkeypatch, 1)
    others = kernels(list(calls.of_attention(attention, BF16)))
    assert others and others <= known
    asked = latent_steps_of_vllm(attention) if attention.latent else steps_of_vllm(attention)
    assert {request.family for request in asked} == {"cache", "decode", "prefill"} and set(asked) <= known


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_a_decode_step_are_known(bias):
    """GPT-OSS-20B's to q, k and v and from heads, whole and in shares, its router's, and rows of other models."""
    known = kernels(list(calls.of_products(bias, BF16)))
    rows = (5120, 2880, 640, 2880 // 8, 32, 128, 6144, 24576)
    for tokens, n in itertools.product((1, 8, 9, 16), rows):
        weight = calls.meta(BF16, n, 2880)
        given = calls.meta(BF16, tokens, 2880), weight, weight[:, 0] if bias else None
        assert kernels([calls.Asked("linear_decode", given, {})]) <= known


def test_a_decode_step_of_gpt_oss_needs_no_compiler():
    """Every op that attnkit_model takes for a token behind a static cache is among those that are compiled ahead."""
    asked = {call.op for call in calls.of_models([models.MODELS["gpt-oss-20b"]], [BF16])}
    assert {"linear_decode", "rope_kv_cache_append", "sdpa_decode", "route_softmax", "fp4_moe"} <= asked


def steps_of_vllm(a: models.Attention) -> dict[object, None]:
    """The kernels that our plugin's own calls ask for: a step of single tokens and one of a prompt among them."""
    layer = steps.Layer(
        a.heads, a.kv_heads, a.dim, BF16, BF16, page=16, window=a.windows[0], softcap=a.softcap, sink=a.sink
    )
    with FakeTensorMode(), warmup.asked_by("sm90") as asked:
        sink = torch.zeros(a.heads) if a.sink else None
        cache = torch.zeros(900, 16, a.kv_heads, 2 * a.dim, dtype=BF16).transpose(1, 2)
        for tokens, longest in ((8, 1), (507, 500)):
            widths = (a.heads * a.dim, a.kv_heads * a.dim, a.kv_heads * a.dim)
            q, k, v = torch.zeros(tokens, sum(widths), dtype=BF16).split(widths, 1)
            key, value = (t.unflatten(1, (a.kv_heads, a.dim)) for t in (k, v))
            q = q.unflatten(1, (a.heads, a.dim)).contiguous()
            table, lengths = torch.zeros(8, 64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
            step = steps.Step.of(tokens, torch.zeros(9, dtype=torch.int32), table, lengths, longest, 1024)
            steps.store(key, value, cache, torch.zeros(tokens, dtype=torch.int64))
            steps.attend(layer, step, q, cache, sink, torch.empty_like(q), decode=True)
    return asked.kernels


def latent_steps_of_vllm(a: models.Attention) -> dict[object, None]:
    """The same of an MLA layer: single tokens, drafts, prompts and a chunk of their cached context."""
    rope, (dim, value) = a.dim - a.latent, a.prompt
    layer = steps.LatentLayer(a.heads, a.latent, rope, dim - rope, value, BF16, BF16, page=16)
    with FakeTensorMode(), warmup.asked_by("sm90") as asked:
        cache = torch.zeros(900, 16, a.dim, dtype=BF16)
        product, slots = torch.zeros(507, 1536 + a.dim, dtype=BF16), torch.zeros(507, dtype=torch.int64)
        k_rope = product[:, None, 1536 + a.latent :]
        steps.store_latents(product[:, 1536 : 1536 + a.latent].contiguous(), k_rope, cache, slots)
        table, lengths = torch.zeros(8, 64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        for each in (1, 4):
            q = torch.zeros(8 * each, a.heads, a.dim, dtype=BF16)
            steps.decode_latents(layer, q, cache, *steps.token_rows(table, lengths, each))
        q, cu = torch.zeros(507, a.heads, dim, dtype=BF16), torch.zeros(9, dtype=torch.int32)
        for keys, causal in ((507, True), (3000, False)):
            k = torch.zeros(keys, a.heads, dim, dtype=BF16)
            v = torch.zeros(keys, a.heads, dim - rope + value, dtype=BF16)[..., dim - rope :]
            steps.attend_packed(q, k, v, steps.Packed(cu, cu, 400, keys), scale=None, causal=causal)
    return asked.kernels


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "qwen3.5-35b-a3b", pytest.param("deepseek-v4-flash", marks=pytest.mark.proof)]
)
def test_what_is_not_attention_asks_for_no_other_kernels_at_other_sizes(name, monkeypatch):
    model = replace(models.MODELS[name], attention=None)
    refused: set[tuple[str, torch.dtype]] = set()
    known = kernels(list(calls.of_models([model], [BF16])), refused)
    assert known and not refused
    between(monkeypatch, 2)
    assert kernels(list(calls.of_models([model], [BF16]))) <= known


def test_shares_are_of_heads_that_divide():
    assert [(a.heads, a.kv_heads) for a in calls.shares(models.Attention(24, 4, 256))] == [
        (24, 4),
        (12, 2),
        (6, 1),
        (3, 1),
    ]
    assert [(a.heads, a.kv_heads) for a in calls.shares(models.Attention(4, 1, 256))] == [(4, 1), (2, 1), (1, 1)]


def test_unknown_models_are_named():
    with pytest.raises(ValueError, match="there is no model 'gpt-5', accepted: all, gpt-oss-20b, .*deepseek-v4-pro$"):
        models.named(["gpt-oss-20b", "gpt-5"])
    assert models.named(["all", "gpt-oss-20b"]) == models.MODELS
