"""The attention of one token a sequence over a static cache, GPT-OSS': what stands between its product and attention.

The model rotates q, rotates keys, and has its cache write keys and values, where a full window moves all of its rows
up; and attention wants its sinks in float32. All of it is one launch of ``rope_kv_cache_append``. The cache holds the
same rows in the same order, and counts its tokens, as after its own ``update``.

It is done where the cache is transformers' own StaticCache whose layers are its own (``_LAYERS``), of the dtype and on
the device of the product, where the op has a row, and where no gradient is asked for. Elsewhere the model's forward
runs: prompts, dynamic and offloaded caches, subclasses, Apple GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss

from .plain import is_plain, is_plain_tensor
from .products import has_row, linear, target_arch

ops = torch.ops.attnkit
_LAYERS = (StaticLayer, StaticSlidingWindowLayer)
_ROTATE = modeling_gpt_oss.apply_rotary_pos_emb
Attended = tuple[torch.Tensor, torch.Tensor | None]


def gpt_oss(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: Any,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Attended | None:
    """The forward of GptOssAttention for hidden_states (B, 1, N), or None where the model's own has to run.

    ``module`` has the weights of q, k and v as one, ``attnkit_weight``, and ``attnkit_bias``.
    """
    cos, sin = position_embeddings  # (B, 1, D/2) or (1, 1, D/2)
    layer = _layer(module, hidden_states, cos, past_key_values)
    if layer is None:
        return None
    joined = linear(hidden_states[:, 0], module.attnkit_weight, module.attnkit_bias)  # (B, q + k + v)
    rows = [projection.weight.shape[0] for projection in (module.q_proj, module.k_proj, module.v_proj)]
    q, key, value = (t.unflatten(-1, (-1, module.head_dim)) for t in joined.split(rows, -1))  # (B, H, D) each
    full = type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int >= layer.max_cache_len
    slot = None if full else layer.cumulative_length.view(1)  # (1,)
    # As strided, Inductor has both in memory once, and not anew for each layer.
    cos, sin = (t.as_strided(t.shape, t.stride()) for t in position_embeddings)
    q, sink = ops.rope_kv_cache_append(
        q, key, value, layer.keys, layer.values, cos, sin, slot, module.sinks
    )  # (B, Hq, D), (Hq,)
    if type(layer) is StaticSlidingWindowLayer:
        layer.cumulative_length_int += 1
    if not full:
        layer.cumulative_length.add_(1)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    out, weights = attend(
        module,
        q[:, :, None],
        layer.keys,
        layer.values,
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        sliding_window=module.sliding_window,
        s_aux=sink,
        **kwargs,
    )  # (B, 1, Hq, D)
    last = module.o_proj
    if is_plain(last, nn.Linear):
        return linear(out.flatten(2), last.weight, last.bias), weights
    return last(out.flatten(2)), weights


STEPS: dict[type, Callable[..., Attended | None]] = {modeling_gpt_oss.GptOssAttention: gpt_oss}


def _layer(module: Any, hidden_states: torch.Tensor, cos: torch.Tensor, cache: Any) -> Any:
    """The layer of ``cache`` that the op may write to, or None."""
    if hidden_states.shape[1] != 1 or type(cache) is not StaticCache or cache.offloading:
        return None
    layer, sinks = cache.layers[module.layer_idx], module.sinks
    if type(layer) not in _LAYERS or not layer.is_initialized or modeling_gpt_oss.apply_rotary_pos_emb is not _ROTATE:
        return None
    if torch.is_grad_enabled() and (hidden_states.requires_grad or sinks.requires_grad):
        return None
    weight = module.attnkit_weight
    if layer.keys.dtype != weight.dtype or layer.keys.device != weight.device or not is_plain_tensor(sinks):
        return None
    given = (hidden_states.dtype, sinks.dtype, 2 * cos.shape[-1], layer.keys.shape[0])
    if given != (weight.dtype, weight.dtype, module.head_dim, hidden_states.shape[0]):
        return None
    known = target_arch(weight.device) == "cpu" or has_row("rope_kv_cache_append", weight.device, weight.dtype)
    return layer if known else None
