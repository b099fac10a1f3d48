"""indexer_scores and indexer_topk against the lightning indexer of DeepSeek-V4 in transformers.

transformers scores in float32 and selects with torch.topk, whose order is open; so the sets are compared, and where
they differ only entries whose scores are closer than float32 can tell may have been exchanged.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Indexer

attnkit = torch.ops.attnkit
RATE = 4


def _indexer(topk: int) -> DeepseekV4Indexer:
    config = DeepseekV4Config(
        hidden_size=64, q_lora_rank=48, num_hidden_layers=2, num_attention_heads=4, head_dim=64, index_n_heads=6,
        index_head_dim=32, index_topk=topk, n_routed_experts=4, num_experts_per_tok=2, partial_rotary_factor=0.25,
    )  # fmt: skip
    indexer = DeepseekV4Indexer(config)
    gen = torch.Generator().manual_seed(1)
    for p in indexer.parameters():
        p.data.copy_(torch.randn(p.shape, generator=gen) * (p.shape[-1] ** -0.5))
    return indexer.eval()


def _run(batch: int, length: int, topk: int):
    """The peer's selection, and what its scorer was given and returned."""
    indexer, seen = _indexer(topk), {}
    indexer.scorer.register_forward_hook(lambda m, args, out: seen.update(given=args, scores=out))
    gen = torch.Generator().manual_seed(length)
    hidden = torch.randn(batch, length, 64, generator=gen)
    residual = torch.randn(batch, length, 48, generator=gen)
    position = torch.arange(length).expand(batch, length)
    with torch.no_grad():
        chosen = indexer(hidden, residual, position, None, 0)  # (B, T, min(K, S))
        q, k, hidden = seen["given"]
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden) * (scorer.weights_scaling * scorer.softmax_scale)  # (B, T, Hi)
    k_len = ((position + 1) // RATE).reshape(-1).to(torch.int32)
    return q.flatten(0, 1), k, weights.flatten(0, 1), k_len, seen["scores"].flatten(0, 1), chosen.flatten(0, 1)


def _exact(q, k, weights):
    """Scores in float64 and how far float32 may be from them: Di + Hi sums and a few products, term by term."""
    batch = k.shape[0]
    q, w = (t.double().unflatten(0, (batch, -1)) for t in (q, weights))
    products = torch.einsum("bthd,bnd->bthn", q, k.double()).relu()
    sizes = torch.einsum("bthd,bnd->bthn", q.abs(), k.double().abs())
    scores, size = (p * v[..., None] for p, v in ((products, w), (sizes, w.abs())))
    roundings = q.shape[-1] + q.shape[-2] + 8
    return scores.sum(2).flatten(0, 1), roundings * 2.0**-24 * size.sum(2).flatten(0, 1)


@pytest.mark.parametrize(("batch", "length"), [(1, 4), (2, 37), (3, 128)])
def test_scores_equal_the_peers(batch, length):
    q, k, weights, k_len, theirs, _ = _run(batch, length, 8)
    exact, bound = _exact(q, k, weights)
    everything = torch.full_like(k_len, k.shape[1])
    ours = attnkit.indexer_scores(q, k, weights, everything)
    assert bool(((ours - exact).abs() <= bound).all())
    assert bool(((theirs - exact).abs() <= bound).all())


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("batch", "length", "topk"), [(1, 3, 4), (2, 37, 4), (2, 200, 8), (1, 64, 100)])
def test_prefill_selects_the_peers_entries(batch, length, topk, paged):
    q, k, weights, k_len, _, theirs = _run(batch, length, topk)
    exact, bound = _exact(q, k, weights)
    table = None
    if paged:
        page = 5
        pages = -(-k.shape[1] // page)
        pool = torch.nn.functional.pad(k, (0, 0, 0, pages * page - k.shape[1]))
        table = torch.arange(batch * pages, dtype=torch.int32).flip(0).reshape(batch, pages)
        k = pool.reshape(batch * pages, page, k.shape[-1]).flip(0)
    scores = attnkit.indexer_scores(q, k, weights, k_len, block_table=table)
    ours = attnkit.indexer_topk(scores, k_len, topk=topk)
    for t, (our_row, peer) in enumerate(zip(ours.tolist(), theirs.tolist(), strict=True)):
        a, b = ({j for j in row if j >= 0} for row in (our_row, peer))
        assert len(a) == len(b) == min(topk, int(k_len[t]))
        assert our_row == sorted(a) + [-1] * (topk - len(a)), "ascending, then -1, where the peer's order is open"
        for gained in a - b:
            for lost in b - a:
                assert abs(exact[t, gained] - exact[t, lost]) <= bound[t, gained] + bound[t, lost]
