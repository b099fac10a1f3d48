"""The attention function "attnkit" of transformers' AttentionInterface, on the ops of this package.

One query per sequence runs sdpa_decode on the cache as it is, more run flash_attention on the keys up to the newest
query, and a block of queries at a position that only the device knows (a static cache) runs sdpa_multi. Packed
sequences run flash_attention_varlen. No call waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_attnkit.core import UnsupportedError

from . import masks

ops = torch.ops.attnkit


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of query (B, Hq, T, D) over key (B, Hkv, S, D) and value (B, Hkv, S, Dv): ((B, T, Hq, Dv), None).

    ``attention_mask`` is what the mask function of this integration returned. ``sliding_window`` counts as in the ops,
    ``s_aux`` (Hq) are attention sinks, ``softcap`` None or 0 is off. Inputs may require gradients, but the ops have no
    backward.

    Raises:
        UnsupportedError: dropout, output_attentions, a dense mask, position_bias, a paged cache, a window or causality
            other than the mask's, or a DeepseekV4Attention that attnkit_model has not replaced.
    """
    if type(module).__name__ == "DeepseekV4Attention":
        raise UnsupportedError(
            "attnkit attention: DeepseekV4Attention also attends compressed entries, which this function is not told"
            " apart from keys; call attnkit_model(model) first"
        )
    if dropout > 0:
        raise UnsupportedError(f"attnkit attention: dropout is {dropout}, accepted: 0 (model.eval(), or no dropout)")
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"attnkit attention: {name} is given, accepted: None; {masks.ADVICE}")
    masks.refuse_weights(kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = dict(
        scale=scaling, window=-1 if sliding_window is None else int(sliding_window), softcap=softcap or 0.0
    )
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    sink = None if s_aux is None else s_aux.float()  # (Hq,)
    if attention_mask is not None and masks.is_packed(attention_mask):
        return _packed(query, key, value, sink, attention_mask, causal, options), None
    return _ranges(query, key, value, sink, attention_mask, causal, options), None


def _agree(layout: masks.Layout, causal: bool, window: int, keys: int) -> None:
    """The mask was made for this very call. A model that says one thing to each would get a third."""
    if (layout.causal, layout.window, layout.keys) != (causal, window, keys):
        raise UnsupportedError(
            f"attnkit attention: called with is_causal={causal}, window {window} and {keys} keys, but the mask was made"
            f" for is_causal={layout.causal}, window {layout.window} and {layout.keys} keys; {masks.ADVICE}"
        )


def _ranges(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    mask: torch.Tensor | None,
    causal: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """One range of keys per sequence: (B, T, Hq, Dv)."""
    (B, _, T, _), S = query.shape, key.shape[2]
    start: torch.Tensor | None = None  # (B,)
    length: torch.Tensor | None = None  # (B,)
    q_end: int | None = S
    if mask is not None:
        start, length, layout = masks.unpack(mask, B)
        q_end = None
        if layout is not None:
            _agree(layout, causal, options["window"], S)
            q_end = layout.q_end
    elif options["window"] >= 0:
        raise UnsupportedError(
            f"attnkit attention: sliding_window is {options['window']}, but the mask is None; accepted: the mask that"
            " the mask function 'attnkit' makes for a window"
        )
    if T == 1 and (causal or options["window"] < 0):
        if length is None:
            length = torch.full((B,), S, dtype=torch.int32, device=query.device)
        return ops.sdpa_decode(query[:, :, 0], key, value, length, sink, start, **options)[0][:, None]
    q = query.transpose(1, 2)  # (B, T, Hq, D)
    if causal and q_end is None:
        return ops.sdpa_multi(q, key, value, length, sink, start, causal=True, **options)[0]
    if causal:
        key, value, length = key[:, :, :q_end], value[:, :, :q_end], None  # no query sees beyond the newest one
    k, v = key.transpose(1, 2), value.transpose(1, 2)  # (B, S, Hkv, D), (B, S, Hkv, Dv)
    return ops.flash_attention(q, k, v, sink, length, start, causal=causal, **options)[0]


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: torch.Tensor | None,
    mask: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
) -> torch.Tensor:
    """Sequences behind one another in each row, whatever the number of rows: (B, T, Hq, Dv)."""
    layout = getattr(mask, "attnkit", None)
    if layout is not None:
        _agree(layout, causal, options["window"], key.shape[2])
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # (B * T, H, D)
    cu = mask[0, 0, 0]  # (n + 1,)
    out = ops.flash_attention_varlen(q, k, v, cu, cu, sink, causal=causal, **options)[0]  # (B * T, Hq, Dv)
    return out.unflatten(0, (query.shape[0], query.shape[2]))
