"""DeepSeek-V4's attention on rope_kv_cache_write, sparse_fmha_with_swa, the indexer's ops and
grouped_output_projection.

Only the attention's forward is replaced, and that only under "attnkit": under another attention implementation the
model's own runs. Projections, weighted norms and the cache layers stay the model's own. Compressed entries are pooled
here as the model pools them, since its compressors return them beside a dense bias; a compressor that may not be read
past its forward (``plain``: offloaded, hooked) is called, and its bias taken apart.
Rotations by torch give the model's numbers, in place: of a head's 512 channels the model copies 448 that stay as they
are. On a CPU, and where a gradient is wanted, norm and rotation of q and keys are torch's, too.

Differences to the replaced forward: of compressed entries with equal scores at the border of the top-k the lowest index
is chosen, and the norm of q's heads rounds numbers of 16 bits once, not thrice, by rope_kv_cache_write with their
rotation. Left-padded rows follow it exactly, and that is not what the same row gives without padding: the model pools
padding tokens into compressed entries, and a decode step of a heavily compressed layer sees every entry whatever the
positions say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4CSACompressor,
    DeepseekV4GroupedLinear,
    DeepseekV4HCACompressor,
    DeepseekV4Indexer,
    DeepseekV4IndexerScorer,
    DeepseekV4UnweightedRMSNorm,
)

from torch_attnkit.core import UnsupportedError
from torch_attnkit.core.target import target_of
from torch_attnkit.kernels.cache.problem import MOST_CHANNELS, VECTOR

from . import masks
from .descriptor import ADVICE, Descriptor
from .plain import is_plain

ops = torch.ops.attnkit


class AttnkitDeepseekV4Attention(DeepseekV4Attention):
    def attnkit_check(self) -> None:
        if type(self.o_a_proj) is not DeepseekV4GroupedLinear or self.o_a_proj.bias is not None:
            raise UnsupportedError(
                f"DeepseekV4Attention: o_a_proj is {self.o_a_proj}, accepted: a DeepseekV4GroupedLinear without bias"
            )
        known = (DeepseekV4CSACompressor, DeepseekV4HCACompressor)
        if self.compressor is not None and type(self.compressor) not in known:
            accepted = ", ".join(c.__name__ for c in known)
            raise UnsupportedError(
                f"DeepseekV4Attention: compressor is {type(self.compressor).__name__}, accepted: {accepted} or None"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | Descriptor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.config._attn_implementation != "attnkit":
            return super().forward(
                hidden_states, position_embeddings, position_ids, attention_mask, past_key_values, **kwargs
            )
        if self.training and self.attention_dropout > 0:
            raise UnsupportedError(
                f"DeepseekV4Attention: attention_dropout is {self.attention_dropout} in training, accepted: 0"
            )
        masks.refuse_weights(kwargs)
        B, T, _ = hidden_states.shape
        cos, sin = position_embeddings[self.rope_layer_type]  # (1 or B, T, R)
        angles = _angles(cos, sin)
        q_low = self.q_a_norm(self.q_a_proj(hidden_states))  # (B, T, low rank)
        q = self.q_b_proj(q_low).view(B, T, self.num_heads, self.head_dim)  # (B, T, Hq, D)
        kv = self.kv_norm(self.kv_proj(hidden_states))  # (B, T, D)
        if _kernel_takes(self.q_b_norm, q, kv, cos):
            q, kv = _in_one_launch(q, kv, cos, sin, self.q_b_norm.eps)
        else:
            q, kv = _rotated(_normed(self.q_b_norm, q), angles), _rotated(kv[:, :, None], angles)[:, :, 0]
        q, kv = q.flatten(0, 1), kv[:, None]  # (Tq, Hq, D), (B, 1, T, D)
        state = None
        if past_key_values is not None:
            kv = past_key_values.update(kv, kv, self.layer_idx)[0]  # (B, 1, S, D), S: the window behind, and T
            state = past_key_values.layers[self.layer_idx]
        kv = kv[:, 0]  # (B, S, D)
        swa_kv, swa_end = _window(kv, T, _start(self, attention_mask, kv, T))
        compressed, chosen, visible = _compressed(self, hidden_states, q_low, position_ids, past_key_values, state)
        out = ops.sparse_fmha_with_swa(
            q, swa_kv, swa_end, compressed, chosen, visible, None, self.sinks.float(),
            scale=self.scaling, window=self.sliding_window,
        )[0].view(B, T, self.num_heads, self.head_dim)  # fmt: skip
        out = _rotated(out, angles, back=True)  # (B, T, Hq, D)
        return self.o_b_proj(_low(self.o_a_proj, out.reshape(B * T, self.o_a_proj.n_groups, -1)).view(B, T, -1)), None


def _low(projection: Any, groups: torch.Tensor) -> torch.Tensor:
    """The first half of the output projection, of groups of heads (Tq, G, Ko): (Tq, G, R)."""
    if not is_plain(projection, DeepseekV4GroupedLinear) or projection.bias is not None:
        return projection(groups).contiguous()
    weight = projection.weight.view(groups.shape[1], -1, projection.in_features)  # (G, R, Ko)
    return ops.grouped_output_projection(groups, weight)


def _kernel_takes(norm: Any, q: torch.Tensor, kv: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether rope_kv_cache_write has a kernel for q (B, T, Hq, D) and kv (B, T, D); it has no gradients."""
    if q.device.type == "cpu" and (torch.compiler.is_compiling() or target_of(q.device).arch == "cpu"):
        return False
    if torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad):
        return False
    D, rope_dim = q.shape[-1], 2 * cos.shape[-1]
    fits = D % VECTOR == 0 and D <= MOST_CHANNELS and rope_dim % VECTOR == 0
    dtypes = q.dtype == kv.dtype and q.dtype != torch.float64 and cos.dtype in (q.dtype, torch.float32)
    return is_plain(norm, DeepseekV4UnweightedRMSNorm) and fits and dtypes


def _in_one_launch(
    q: torch.Tensor, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, T, Hq, D) normed and rotated, and kv (B, T, D) rotated: rows of a cache that holds nothing else."""
    B, T, D = kv.shape
    keys, slot = kv.new_empty(B * T, D), torch.arange(B * T, dtype=torch.int32, device=kv.device)
    cos, sin = (t.expand(B, -1, -1).flatten(0, 1) for t in (cos, sin))  # (B * T, R)
    q_out = ops.rope_kv_cache_write(
        q.flatten(0, 1), kv.flatten(0, 1), keys, slot, cos, sin, eps=eps, rope_dim=2 * cos.shape[1]
    )
    return q_out.view(q.shape), keys.view(B, T, D)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """``norm`` of x (..., D), of 16 bits by one launch where the model takes seven."""
    if is_plain(norm, DeepseekV4UnweightedRMSNorm) and x.dtype.itemsize == 2:
        return rms_norm(x, x.shape[-1:], eps=norm.eps)
    return norm(x)


def _angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of cos and sin (B, T, R): what the two channels of a pair are multiplied with, and what with each other."""
    cos, sin = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (cos, sin))
    return cos[:, :, None, :, None], torch.stack((-sin, sin), -1)[:, :, None]  # (B, T, 1, R, 1), (B, T, 1, R, 2)


def _rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], back: bool = False) -> torch.Tensor:
    """``apply_rotary_pos_emb`` of x (B, T, heads, D), to the bit, in x itself unless a gradient goes through it."""
    cos, sin = angles
    x = x.clone() if x.requires_grad else x
    pairs = x[..., -2 * cos.shape[-2] :].unflatten(-1, (-1, 2))  # (B, T, heads, R, 2)
    held = pairs.float() if pairs.dtype == torch.float64 else pairs  # products make float32 of 16 bits
    straight, crossed = held * cos, held.flip(-1) * sin
    pairs.copy_(straight.sub_(crossed) if back else straight.add_(crossed))
    return x


def _start(
    attention: Any, mask: torch.Tensor | Descriptor | None, kv: torch.Tensor, queries: int
) -> torch.Tensor | None:
    """Where the valid keys of ``kv`` (B, S, D) begin, (B,), None if all do at 0."""
    if mask is None:
        raise UnsupportedError(f"DeepseekV4Attention: attention_mask is None, accepted: the model's own mask; {ADVICE}")
    mask = masks.described(mask).beside(kv)
    keys = kv.shape[1]
    layout, expected = mask.layout, (True, attention.sliding_window, queries, keys)
    if mask.cu_seqlens is not None or layout[:4] != expected:
        packed = "packed sequences, " * (mask.cu_seqlens is not None)
        raise UnsupportedError(
            f"DeepseekV4Attention: the mask was made for {packed}is_causal={layout.causal}, window {layout.window},"
            f" {layout.queries} queries and {layout.keys} keys, accepted: is_causal=True, window"
            f" {attention.sliding_window}, {queries} queries and {keys} keys; {ADVICE}"
        )
    return mask.start


def _window(kv: torch.Tensor, T: int, start: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (B, S, D) and where the window of each token ends (Tq,), left padding moved behind the valid keys."""
    B, S, D = kv.shape
    end = torch.arange(S - T + 1, S + 1, dtype=torch.int32, device=kv.device).repeat(B, 1)  # (B, T)
    if start is not None:
        index = torch.arange(S, device=kv.device) + start[:, None]  # (B, S) what lies behind S is never seen
        kv = kv.gather(1, index.clamp(max=S - 1)[..., None].expand(B, S, D))
        end = (end - start[:, None]).clamp(min=0)  # a padding token sees nothing
    return kv, end.reshape(-1)


def _compressed(
    attention: Any, hidden: torch.Tensor, q_low: torch.Tensor, position_ids: torch.Tensor, cache: Any, state: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compressed entries (B, C, D), the chosen ones (Tq, K) and how many of them are in the past (Tq,)."""
    compressor = attention.compressor
    if compressor is None:
        return None, None, None
    if state is not None and not hasattr(state, "store_compression_weights"):
        raise ValueError(
            f"DeepseekV4Attention: layer {attention.layer_idx} of past_key_values is {type(state).__name__}, accepted:"
            " the compressed layers of DynamicCache(config=model.config)"
        )
    sparse = isinstance(compressor, DeepseekV4CSACompressor)
    B, T, _ = hidden.shape
    called = not _readable(compressor)
    if called:
        entries, bias = compressor(hidden, q_low, position_ids, cache, attention.layer_idx)
        entries = entries[:, 0]  # (B, C, D)
    else:
        entries = _entries(compressor, hidden, state, "compressor")  # (B, C, D)
        # Its state goes on, whether anything is chosen or not.
        keys = _entries(compressor.indexer, hidden, state, "indexer") if sparse else entries
    C = entries.shape[1]
    if C == 0:
        return None, None, None
    if T == 1 and not sparse:
        return entries, None, None
    seen = ((position_ids + 1) // compressor.compress_rate).clamp(max=C)  # (1 or B, T)
    visible = seen.to(torch.int32).repeat(B // seen.shape[0], 1).view(-1)  # (Tq,)
    if not sparse:
        return entries, None, visible
    indexer = compressor.indexer
    topk = min(indexer.index_topk, C)
    if called:
        return entries, _seen(bias, topk), visible
    cos, sin = indexer.rotary_emb(hidden, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    q = indexer.q_b_proj(q_low).view(B, T, indexer.num_heads, indexer.head_dim)  # (B, T, Hi, Di)
    q = _rotated(q, _angles(cos, sin)).flatten(0, 1)  # (Tq, Hi, Di)
    scorer = indexer.scorer
    # Both scales are positive, so that they may move from the scores into the weights.
    weights = scorer.weights_proj(hidden).flatten(0, 1).float() * (scorer.weights_scaling * scorer.softmax_scale)
    scores = ops.indexer_scores(q, keys, weights, visible)  # (Tq, C)
    return entries, ops.indexer_topk(scores, visible, topk=topk), visible


def _readable(compressor: Any) -> bool:
    """Whether the parts of a compressor, and of its indexer, may be used without calling it."""
    if not is_plain(compressor, DeepseekV4CSACompressor, DeepseekV4HCACompressor):
        return False
    indexer = getattr(compressor, "indexer", None)
    return indexer is None or (
        is_plain(indexer, DeepseekV4Indexer) and is_plain(indexer.scorer, DeepseekV4IndexerScorer)
    )


def _seen(bias: torch.Tensor, topk: int) -> torch.Tensor:
    """The entries (Tq, K) that the model's own bias (B, 1, T, C) lets each token see, -1 where they are fewer."""
    seen = (bias == 0).flatten(0, 2)  # (Tq, C)
    first = seen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :topk]  # (Tq, K)
    return first.masked_fill(~seen.gather(1, first), -1).to(torch.int32)


def _entries(block: Any, hidden: torch.Tensor, state: Any, name: str) -> torch.Tensor:
    """All compressed entries so far, (B, C, D): those of ``state`` and those that ``hidden`` (B, T, N) completes.

    An entry is the gated mean of a window of ``compress_rate`` tokens. The two-series kind joins each window with the
    one before it. Without ``state`` the tokens of an unfinished window are left out.
    """
    rate, dim = block.compress_rate, block.head_dim
    values, gates, first = block.kv_proj(hidden), block.gate_proj(hidden), 0  # (B, T, D or 2D) each
    if state is not None:
        values, gates, first = state.store_compression_weights(name, values, gates)
    n = values.shape[1] // rate
    values = values[:, : n * rate].unflatten(1, (n, rate))  # (B, n, rate, D or 2D)
    gates = gates[:, : n * rate].unflatten(1, (n, rate)) + block.position_bias
    if n == 0:
        new = values.new_zeros(hidden.shape[0], 0, dim)  # (B, 0, D)
    else:
        if values.shape[-1] == 2 * dim:
            values, gates = _joined(values, gates, dim, state, name)
        share = gates.softmax(2, dtype=torch.float32).to(values.dtype)  # (B, n, rate or 2 rate, D)
        new = block.kv_norm((values * share).sum(2))  # (B, n, D)
        position = first + rate * torch.arange(n, device=new.device)  # (n,)
        cos, sin = block.rotary_emb(new, position_ids=position[None], layer_type=block.rope_layer_type)
        new = _rotated(new[:, :, None], _angles(cos, sin))[:, :, 0]
    return new if state is None else state.update_compressor_states(name, new)


def _joined(
    values: torch.Tensor, gates: torch.Tensor, dim: int, state: Any, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first series of the window before beside the second series of each window: (B, n, 2 rate, D) each."""
    before = (None, None) if state is None else state.update_overlap_state(name, values, gates, dim)
    if before[0] is None:  # nothing lies before the first window: weight 0
        before = torch.zeros_like(values[:, 0, :, :dim]), torch.full_like(gates[:, 0, :, :dim], -torch.inf)
    joined = []
    for t, last in zip((values, gates), before, strict=True):
        earlier = torch.cat((last[:, None].to(t.dtype), t[:, :-1, :, :dim]), 1)  # (B, n, rate, D)
        joined.append(torch.cat((earlier, t[..., dim:]), 2))
    return joined[0], joined[1]


SWAPS: dict[type, type] = {DeepseekV4Attention: AttnkitDeepseekV4Attention}
