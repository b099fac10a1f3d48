"""The attention function "attnkit" of transformers' AttentionInterface, on the ops of this package.

One query per sequence runs sdpa_decode on the cache as it is, more run flash_attention on the keys up to the newest
query, and a block of queries at a position that only the device knows (a static cache) runs sdpa_multi. Packed
sequences run flash_attention_varlen, and batches of generate_batch what ``continuous`` says. No call waits for the
device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_attnkit.core import UnsupportedError

from . import continuous, masks
from .descriptor import ADVICE, Descriptor, Layout
from .joined import stood_for

ops = torch.ops.attnkit
# What the eager attention of some model reads and the ops have not: biases, keys chosen one by one, a sink for each
# token.
_FOREIGN = ("position_bias", "indices", "block_indices", "sinks")


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Descriptor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query (B, Hq, T, D) over key (B, Hkv, S, D) and value (B, Hkv, S, Dv): ((B, T, Hq, Dv), None).

    ``attention_mask`` is what the mask function of this integration returned. As in eager attention it says what is
    seen; ``sliding_window``, which counts as in the ops, and ``is_causal`` may not ask for something else. None hides
    nothing. ``s_aux`` (Hq) are attention sinks, ``softcap`` None or 0 is off. Inputs may require gradients, but the ops
    have no backward.

    Raises:
        UnsupportedError: dropout, output_attentions, a dense mask, a bias or a choice of keys besides the mask, a cache
            that is not generate_batch's, a window or causality other than the mask's, a causal call without a mask, or
            a DeepseekV4Attention that attnkit_model has not replaced.
    """
    module = stood_for(module)
    if type(module).__name__ == "DeepseekV4Attention":
        raise UnsupportedError(
            "attnkit attention: DeepseekV4Attention also attends compressed entries, which this function is not told"
            " apart from keys; call attnkit_model(model) first"
        )
    if dropout > 0:
        raise UnsupportedError(f"attnkit attention: dropout is {dropout}, accepted: 0 (model.eval(), or no dropout)")
    for name in _FOREIGN:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"attnkit attention: {name} is given, accepted: None; {ADVICE}")
    masks.refuse_weights(kwargs)
    back = None
    if (latents := getattr(module, "attnkit_keys", None)) is not None:  # mla.py
        query, key, value, back = latents(query, key, value)
    T, S = query.shape[2], key.shape[2]
    if attention_mask is None:
        mask = Descriptor(_unmasked(module, is_causal, sliding_window, T, S))
    else:
        mask = masks.described(attention_mask).beside(query)
        _agree(mask.layout, is_causal, sliding_window, T, S)
    options: dict[str, Any] = dict(scale=scaling, window=mask.layout.window, softcap=softcap or 0.0)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    sink = None if s_aux is None else s_aux.float()  # (Hq,)
    if kwargs.get("cache") is not None:
        layer = getattr(module, "layer_idx", 0)
        return continuous.over_pages(layer, query, key, value, sink, mask.layout.causal, options, kwargs), None
    if mask.cu_seqlens is not None:
        return _packed(query, key, value, sink, mask, options), None
    if kwargs.get("cu_seq_lens_q") is not None:
        raise UnsupportedError(
            "attnkit attention: cu_seq_lens_q says that sequences are packed, but the mask was made for one sequence a"
            " row; accepted: position_ids that restart, no attention_mask and use_cache=False"
        )
    out = _ranges(query, key, value, sink, mask, options)
    return out if back is None else back(out), None


def _unmasked(module: nn.Module, is_causal: bool | None, window: int | None, queries: int, keys: int) -> Layout:
    """The layout of a call whose model did not ask the mask function, or threw the mask away."""
    if window is not None:
        raise UnsupportedError(
            f"attnkit attention: sliding_window is {window}, but the mask is None; accepted: the mask that the mask"
            " function 'attnkit' makes for a window"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and queries > 1:
        raise UnsupportedError(
            f"attnkit attention: the mask of {queries} queries is None, from which eager attention follows that every"
            f" query sees every key and is_causal that it does not; accepted: the mask that the mask function 'attnkit'"
            f" makes, or is_causal=False; {ADVICE}"
        )
    return Layout(False, -1, queries, keys, None)


def _agree(layout: Layout, is_causal: bool | None, window: int | None, queries: int, keys: int) -> None:
    """The mask was made for this very call. A model that says one thing to each would get a third.

    Only is_causal=False may stand beside a causal mask: so models tell SDPA to leave causality to the mask.
    """
    requested = (is_causal or layout.causal, layout.window if window is None else window)
    # Where nothing depends on a query's position, any number of them has the same mask.
    known = queries if layout.causal or layout.window >= 0 else layout.queries
    if (*requested, known, keys) != (layout.causal, layout.window, layout.queries, layout.keys):
        raise UnsupportedError(
            f"attnkit attention: called with is_causal={is_causal}, window {requested[1]}, {queries} queries and {keys}"
            f" keys, but the mask was made for is_causal={layout.causal}, window {layout.window}, {layout.queries}"
            f" queries and {layout.keys} keys; {ADVICE}"
        )


def _ranges(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    mask: Descriptor,
    options: dict[str, Any],
) -> torch.Tensor:
    """One range of keys per sequence: (B, T, Hq, Dv)."""
    (B, _, T, _), S = query.shape, key.shape[2]
    layout, start, length = mask.layout, mask.start, mask.length
    if T == 1 and (layout.causal or layout.window < 0):
        if length is None:
            length = torch.full((B,), S, dtype=torch.int32, device=query.device)
        return ops.sdpa_decode(query[:, :, 0], key, value, length, sink, start, **options)[0][:, None]
    q = query.transpose(1, 2)  # (B, T, Hq, D)
    if layout.causal and length is not None:
        return ops.sdpa_multi(q, key, value, length, sink, start, causal=True, **options)[0]
    if layout.causal:
        key, value = key[:, :, : layout.q_end], value[:, :, : layout.q_end]  # no query sees beyond the newest one
    k, v = key.transpose(1, 2), value.transpose(1, 2)  # (B, S, Hkv, D), (B, S, Hkv, Dv)
    return ops.flash_attention(q, k, v, sink, length, start, causal=layout.causal, **options)[0]


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    mask: Descriptor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Sequences behind one another in each row, whatever the number of rows: (B, T, Hq, Dv)."""
    key, value = key[:, :, : mask.layout.q_end], value[:, :, : mask.layout.q_end]  # a static cache has more
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # (B * T, H, D)
    cu = mask.cu_seqlens  # (n + 1,)
    out = ops.flash_attention_varlen(q, k, v, cu, cu, sink, causal=mask.layout.causal, **options)[0]  # (B * T, Hq, Dv)
    return out.unflatten(0, (query.shape[0], query.shape[2]))
