"""The attention of a DeepSeek-V4 layer from its parts: indexer, top-k, sparse attention, output projection.

Every token attends a sliding window of its request and, of the compressed entries of the past, those that the indexer
finds most relevant. The output is rotated back, quantised to NVFP4 and projected group by group. Two requests of 48
tokens stand packed one behind the other; ``request_ids`` says whose a token is.

    indexer_scores -> indexer_topk -> sparse_fmha_with_swa -> inverse_rope_fp4 -> grouped_output_projection

The yardstick is dense attention in plain PyTorch, with every key that a token does not see masked out. The first two
ops are one where no scores are wanted (``indexer_select``), and so are the next two on Hopper
(``sparse_fmha_inverse_rope_fp4``).

    python examples/deepseek_v4_layer.py
"""

from __future__ import annotations

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

ops = torch.ops.attnkit

R, T, RATE = 2, 48, 4  # requests, tokens of each, tokens under one compressed entry
HQ, D, ROPE = 8, 64, 16  # heads, their size, channels that are rotated
HI, DI, TOPK, WINDOW = 4, 32, 3, 8  # the indexer's heads and their size, entries to choose, window
GROUPS, RANK = 2, 32  # the output projection: groups of heads, rows of a group's matrix


def attended(
    q: torch.Tensor, kv: torch.Tensor, entries: torch.Tensor, chosen: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """Dense attention of the tokens of all requests over window and chosen entries, (Tq, Hq, D)."""
    keys = torch.cat((kv, entries), 1)  # (R, T + C, D)
    at = torch.arange(T)
    ahead = at[:, None] - at  # (T, T) how far key lies behind query
    window = ((ahead >= 0) & (ahead < WINDOW)).expand(R, T, T)
    picked = torch.zeros(R, T, entries.shape[1] + 1, dtype=torch.bool)
    picked.scatter_(2, chosen.view(R, T, -1).long() % (entries.shape[1] + 1), True)  # -1 goes to the last column
    seen = torch.cat((window, picked[..., :-1]), 2)[:, :, None]  # (R, T, 1, T + C)
    scores = torch.einsum("rthd,rkd->rthk", q.view(R, T, HQ, D), keys) * D**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    scores = torch.cat((scores, sink[:, None].expand(R, T, HQ, 1)), -1)  # the sink joins the denominator
    return torch.einsum("rthk,rkd->rthd", scores.softmax(-1)[..., :-1], keys).flatten(0, 1)


def main() -> None:
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    tokens, entries = R * T, T // RATE
    q, kv, compressed, sink = normal(tokens, HQ, D), normal(R, T, D), normal(R, entries, D), normal(HQ)
    position = torch.arange(T, dtype=torch.int32).repeat(R)  # (Tq,)
    request = torch.arange(R, dtype=torch.int32).repeat_interleave(T)  # (Tq,)
    past = (position + 1) // RATE  # (Tq,) entries whose tokens have all been seen

    scores = ops.indexer_scores(
        normal(tokens, HI, DI), normal(R, entries, DI), normal(tokens, HI).abs(), past, request
    )  # (Tq, C), -inf in the future
    chosen = ops.indexer_topk(scores, past, topk=TOPK)  # (Tq, TOPK), -1 where there are fewer
    out, _, _ = ops.sparse_fmha_with_swa(
        q, kv, position + 1, compressed, chosen, past, request, sink, window=WINDOW
    )  # (Tq, Hq, D)

    want = attended(q, kv, compressed, chosen, sink)
    last = T - 1
    print(f"token {last} attends tokens {T - WINDOW} to {last} and entries {chosen[last].tolist()}")
    print(f"largest difference to dense, masked attention: {float((out - want).abs().max()):.1e}")
    assert (out - want).abs().max() < 1e-5

    angle = position[:, None] * 10000.0 ** -(torch.arange(ROPE // 2) / (ROPE // 2))  # (Tq, ROPE/2)
    cos, sin = angle.cos(), angle.sin()
    # As for global_scale of nvfp4_quantize: what is largest becomes 448 * 6.
    o_global = torch.tensor(448 * 6.0) / out.abs().max()
    codes, o_scale = ops.inverse_rope_fp4(out, cos, sin, o_global)  # (Tq, Hq, D/2), (Tq, Hq, D/16)
    wo_a = normal(GROUPS, RANK, HQ // GROUPS * D) * (HQ // GROUPS * D) ** -0.5
    w_global = torch.tensor(448 * 6.0) / wo_a.abs().max()
    w_codes, w_scale = ops.nvfp4_quantize(wo_a, w_global)
    o = [t.view(tokens, GROUPS, -1) for t in (codes, o_scale)]
    low = ops.grouped_output_projection(
        o[0],
        w_codes,
        o[1],
        w_scale,
        o_global,
        w_global,
        format="nvfp4",
    )  # (Tq, GROUPS, RANK)

    a, b = want[..., -ROPE::2], want[..., -ROPE + 1 :: 2]  # pairs of neighbours, rotated back
    c, s = cos[:, None], sin[:, None]
    back = torch.cat((want[..., :-ROPE], torch.stack((a * c + b * s, b * c - a * s), -1).flatten(-2)), -1)
    exact = torch.einsum("tgk,grk->tgr", back.view(tokens, GROUPS, -1), wo_a)
    error = float((low - exact).norm() / exact.norm())
    print(f"the projection in NVFP4 is off by {error:.1%} of the exact one's norm")
    assert 0.01 < error < 0.2


if __name__ == "__main__":
    main()
