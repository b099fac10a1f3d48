"""The routers against those of DeepSeek-V4, GPT-OSS and Qwen in transformers: the same experts, the same weights.

transformers leaves the order of the experts open in places, so weights are compared expert by expert.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

attnkit = torch.ops.attnkit
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
HIDDEN, VOCABULARY, ROWS = 48, 97, 64


def _module(cls, dtype, experts, topk, **config):
    """A router of random parameters and buffers, and random hidden states for it."""
    gen = torch.Generator().manual_seed(experts)
    names = dict(num_experts=experts, num_local_experts=experts, hidden_size=HIDDEN, num_experts_per_tok=topk)
    module = cls(SimpleNamespace(**names, vocab_size=VOCABULARY, **config)).to(dtype)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=gen) * HIDDEN**-0.5 * 3)
        else:
            rows = [torch.randperm(experts, generator=gen)[:topk] for _ in range(len(tensor))]
            tensor.data.copy_(torch.stack(rows))
    return module, torch.randn(ROWS, HIDDEN, generator=gen, dtype=dtype), gen


def _by_expert(weights, indices, experts):
    """Weights (R, K) laid out over all experts, (R, E); nan where an expert was not chosen."""
    out = torch.full((len(weights), experts), torch.nan, dtype=torch.float64)
    return out.scatter(1, indices.long(), weights.double())


def _agree(ours, theirs, experts, roundings):
    """The same experts, and weights that differ by at most that many float32 roundings."""
    a, b = _by_expert(*ours, experts), _by_expert(*theirs, experts)
    assert torch.equal(a.isnan(), b.isnan())
    assert bool(((a - b).abs().nan_to_num() <= roundings * 2.0**-24 * b.abs().nan_to_num()).all())


@DTYPES
@pytest.mark.parametrize(("experts", "topk", "scale"), [(256, 6, 1.5), (384, 6, 2.5), (144, 6, 1.0), (7, 7, 1.5)])
def test_sqrt_softplus_equals_deepseek_v4(dtype, experts, topk, scale):
    router, hidden, _ = _module(
        DeepseekV4TopKRouter, dtype, experts, topk, scoring_func="sqrtsoftplus", routed_scaling_factor=scale
    )
    router.e_score_correction_bias.data = router.e_score_correction_bias.float()
    with torch.no_grad():
        logits, weights, indices = router(hidden)
    ours = attnkit.route_sqrt_softplus(logits.detach(), router.e_score_correction_bias, topk=topk, route_scale=scale)
    # In float64 only the store of our float32 weights rounds; in float32 both round on their way.
    _agree(ours, (weights, indices), experts, 2 * (topk + 16) if dtype == torch.float32 else 1 + 2.0**-20)


@DTYPES
@pytest.mark.parametrize(("experts", "topk"), [(256, 6), (144, 3)])
def test_hash_equals_deepseek_v4(dtype, experts, topk):
    router, hidden, gen = _module(
        DeepseekV4HashRouter, dtype, experts, topk, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5
    )
    token_ids = torch.randint(0, VOCABULARY, (ROWS,), generator=gen)
    with torch.no_grad():
        logits, weights, indices = router(hidden, token_ids)
    ours = attnkit.route_hash(logits, token_ids, router.tid2eid, route_scale=1.5)
    assert torch.equal(ours[1].long(), indices)  # the table's order
    _agree(ours, (weights, indices), experts, 2 * (topk + 16) if dtype == torch.float32 else 1 + 2.0**-20)


def test_softplus_of_the_peer_is_linear_above_20():
    """torch.nn.functional.softplus returns x itself above 20, which float64 can tell from log(1 + e^x)."""
    x = torch.tensor([[19.0, 20.5, 24.0]], dtype=torch.float64)
    theirs = torch.nn.functional.softplus(x)
    assert theirs[0, 1:].tolist() == [20.5, 24.0] != torch.log1p(x.exp())[0, 1:].tolist()
    ours, _ = attnkit.route_sqrt_softplus(x, topk=3, renormalize=False)
    assert torch.equal(ours.flip(1), torch.log1p(x.exp()).sqrt().float())
    assert torch.equal(ours.flip(1), theirs.sqrt().float()), "the difference does not survive in float32 weights"


@DTYPES
@pytest.mark.parametrize(("experts", "topk"), [(32, 4), (128, 4)])
def test_softmax_of_the_chosen_equals_gpt_oss(dtype, experts, topk):
    router, hidden, _ = _module(GptOssTopKRouter, dtype, experts, topk)
    with torch.no_grad():
        logits, weights, indices = router(hidden)
    ours = attnkit.route_softmax(logits, topk=topk)
    assert torch.equal(ours[1].long(), indices)
    _agree(ours, (weights, indices), experts, 2 * (topk + 16) if dtype == torch.float32 else 1 + 2.0**-20)


@DTYPES
@pytest.mark.parametrize(
    ("peer", "renormalize"),
    [
        (Qwen3MoeTopKRouter, False),
        (Qwen3MoeTopKRouter, True),
        (Qwen3NextTopKRouter, False),
        (Qwen3NextTopKRouter, True),
        (Qwen3_5MoeTopKRouter, True),  # has no switch
    ],
)
def test_softmax_over_all_equals_qwen(dtype, peer, renormalize):
    experts, topk = 128, 8
    router, hidden, _ = _module(peer, dtype, experts, topk, norm_topk_prob=renormalize)
    with torch.no_grad():
        logits, weights, indices = router(hidden)
    ours = attnkit.route_softmax(logits, topk=topk, softmax_first=True, renormalize=renormalize)
    # The peer's softmax is in float32 for every dtype.
    _agree(ours, (weights, indices), experts, 2 * (experts + topk + 16))


def test_bf16_logits_give_float32_weights_where_peers_round_to_bf16():
    router, hidden, _ = _module(Qwen3NextTopKRouter, torch.bfloat16, 128, 8, norm_topk_prob=True)
    with torch.no_grad():
        logits, weights, _ = router(hidden)
    ours, _ = attnkit.route_softmax(logits, topk=8, softmax_first=True, renormalize=True)
    exact = logits.double().softmax(-1).sort(-1, descending=True).values[:, :8]
    exact = exact / exact.sum(-1, keepdim=True)
    assert weights.dtype == torch.bfloat16 and ours.dtype == torch.float32
    ours_off, theirs_off = ((w.double() - exact).abs().max() for w in (ours, weights))
    assert ours_off <= (128 + 8 + 16) * 2.0**-24 < theirs_off


def test_experts_whose_probability_underflows_are_chosen_by_their_logits():
    """The peer selects among probabilities, where such experts are all 0 and torch.topk may take any of them."""
    logits = torch.tensor([[0.0, -300.0, -200.0, -250.0]])
    probabilities = logits.softmax(-1)
    assert probabilities[0, 1:].tolist() == [0.0, 0.0, 0.0]
    weights, indices = attnkit.route_softmax(logits, topk=2, softmax_first=True)
    assert indices.tolist() == [[0, 2]] and weights.tolist() == [[1.0, 0.0]]
