"""The mask function "attnkit": what a call's mask allows, as a few integers per sequence instead of a (T, S) matrix.

The ops take ranges, so a mask is a Descriptor with ``[kv_start, kv_len]`` per sequence, in the coordinates of the keys
that the layer hands to its attention. ``kv_len`` of a causal mask is the position behind the newest query; of a
bidirectional one, the end of the valid keys. Packed sequences (position_ids that restart) become ``cu_seqlens`` over
the flattened batch, and so do a prompt's chunks (Llama 4); of a decode step ``kv_start`` is where its chunk begins.
There is always a descriptor: a model that does its own arithmetic would take None for permission to see everything.

Everything else raises UnsupportedError: the ops cannot express it, and a dense fallback would hide that. Looking at a
2-D attention_mask costs one device synchronisation per mask and forward, whatever the number of layers. Inside a
traced graph the same check is an assertion of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

from torch_attnkit.core import UnsupportedError

from .descriptor import ADVICE, Descriptor, Layout

ACCEPTED = (
    "accepted: causal or bidirectional, with or without a sliding window, over one run of valid tokens per sequence,"
    f" or packed sequences without a cache; {ADVICE}"
)

# Models whose recurrences go on over what attention gave to padding tokens. Eager attention gives these the mean of all
# values, the ops 0, and every later token would differ.
_READ_PADDING = ("recurrent_gemma",)


class _Packed(NamedTuple):
    causal: bool
    window: int
    sequences: torch.Tensor  # (B, T): the sequence each token of a row belongs to


class _Chunked(NamedTuple):
    """Causal attention inside chunks of ``size`` tokens, of which the first begins behind ``padding`` (B,)."""

    size: int
    padding: torch.Tensor


# transformers hands a mask over as a function. Its code object tells which one it is, and its closure what it was made
# with; a name would not tell two inner functions apart.
_AND = and_masks(causal_mask_function).__code__
_WINDOW = sliding_window_overlay(1).__code__
_WINDOW_BOTH = sliding_window_bidirectional_overlay(1).__code__
_CHUNK = chunked_overlay(1, torch.empty(0)).__code__
_SAME_SEQUENCE = packed_sequence_mask_function(torch.empty(0)).__code__
_OWN_POSITIONS = remap_positions_for_packed_sequence(causal_mask_function, torch.empty(0)).__code__


def _closure(function: Callable[..., Any], name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents  # type: ignore[index]


def _parts(function: Callable[..., Any]) -> tuple[Any, Any, Any, Any] | None:
    """The two functions that ``function`` intersects, each with its code object."""
    if getattr(function, "__code__", None) is not _AND:
        return None
    parts = _closure(function, "mask_functions")
    if len(parts) != 2:
        return None
    a, b = parts
    return a, getattr(a, "__code__", None), b, getattr(b, "__code__", None)


def _plain(function: Callable[..., Any]) -> tuple[bool, int] | None:
    """(causal, window) of a mask function of transformers; None for every other function."""
    if function is causal_mask_function:
        return True, -1
    if function is bidirectional_mask_function:
        return False, -1
    parts = _parts(function)
    if parts is None:
        return None
    overlay, code, base, _ = parts
    if code is _WINDOW and base is causal_mask_function:
        return True, int(_closure(overlay, "sliding_window"))
    if code is _WINDOW_BOTH and base is bidirectional_mask_function:
        return False, int(_closure(overlay, "sliding_window")) + 1  # transformers counts the last distance in
    return None


def _pattern(function: Callable[..., Any]) -> tuple[bool, int] | _Packed | _Chunked | None:
    parts = _parts(function)
    if parts is not None and parts[1] is _CHUNK and parts[2] is causal_mask_function:
        return _Chunked(int(_closure(parts[0], "chunk_size")), _closure(parts[0], "left_padding"))
    if parts is not None and parts[1] is _SAME_SEQUENCE and parts[3] is _OWN_POSITIONS:
        inner = _plain(_closure(parts[2], "mask_function"))
        return None if inner is None else _Packed(*inner, _closure(parts[0], "packed_sequence_mask"))
    return _plain(function)


def _traced_pattern(function: Callable[..., Any], queries: int, kwargs: dict[str, Any]) -> tuple[bool, int] | None:
    """(causal, window) inside a traced region, where functions have no closure to look at.

    transformers allows one of the two shortcuts exactly for the masks that it builds without any addition, but for one
    query over a static cache, where it allows none. There an intersection is of a window and causality, or of those and
    packed sequences, which one query cannot be; only bidirectional masks name the other shortcut.
    """
    causal, both = kwargs.get("allow_is_causal_skip", False), kwargs.get("allow_is_bidirectional_skip", False)
    local = kwargs.get("local_size")
    if local is not None and local != getattr(kwargs.get("config"), "sliding_window", None):
        return None
    if function is causal_mask_function:
        return True, -1
    if queries == 1 and local is not None and "allow_is_bidirectional_skip" not in kwargs:
        causal = causal or getattr(function, "__code__", None) is _AND
    if causal == both:
        return None
    return causal, -1 if local is None else local if causal else local + 1


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | Descriptor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Descriptor:
    """The descriptor of one mask (see the module). Registered with AttentionMaskInterface as "attnkit".

    Raises:
        UnsupportedError: the mask is not one that the ops can express (holes between valid tokens, a custom mask
            function, blocks, chunks of a prompt behind a cache), or the newest token of a decode step is masked.
        ValueError: attention_mask has another number of axes than two, or covers none of the keys.
    """
    if isinstance(attention_mask, Descriptor):  # generate() makes the masks of a static cache before the forward
        return attention_mask
    model = getattr(kwargs.get("config"), "model_type", None)
    tracing = torch.compiler.is_compiling()
    if use_vmap:
        found: tuple[bool, int] | _Packed | _Chunked | None = None
    else:
        found = _traced_pattern(mask_function, q_length, kwargs) if tracing else _pattern(mask_function)
    if found is None:
        name = getattr(mask_function, "__qualname__", type(mask_function).__name__)
        hint = " (while tracing, pass a 2-D attention_mask: without one the call may hold packed sequences)"
        raise UnsupportedError(f"attnkit mask: the pattern {name} is not supported{hint * tracing}; {ACCEPTED}")
    if isinstance(found, _Packed):
        T = found.sequences.shape[1]
        layout = Layout(found.causal, found.window, T, T, T)
        return Descriptor(layout, cu_seqlens=_cu_seqlens(found.sequences), model=model)
    q_end = q_offset + q_length - kv_offset
    chunks = found if isinstance(found, _Chunked) else None
    causal, window = (True, -1) if isinstance(found, _Chunked) else found
    if window >= 0 and not causal and not (isinstance(q_end, int) and q_end == kv_length):
        raise UnsupportedError(f"attnkit mask: a bidirectional window over {kv_length} keys that end at {q_end}")
    # Of one query no shape depends on the position, nor of a prompt that the host can cut the keys for.
    known = q_end if isinstance(q_end, int) and q_length > 1 else None
    ends = _ends(q_end, batch_size, device) if causal and known is None else None  # (B,)
    start = stop = None
    if attention_mask is not None:
        start, stop = _run(attention_mask, kv_offset, kv_length, ends if q_length == 1 else None)
        if start is not None and model in _READ_PADDING:
            raise UnsupportedError(
                f"attnkit mask: attention_mask hides the first tokens of a sequence, whose attention the recurrences of"
                f" {model} read, accepted: sequences that begin at the first token; {ADVICE}"
            )
    layout = Layout(causal, window, q_length, kv_length, known)
    if chunks is not None and q_length == 1:
        begin = (_chunk_of(q_offset, chunks, device) - kv_offset).clamp(min=0)  # (B,)
        start = begin if start is None else torch.maximum(start, begin)
    elif chunks is not None and not (isinstance(q_offset, int) and q_offset + q_length <= chunks.size):
        if known is None or q_offset != 0 or kv_offset != 0:
            raise UnsupportedError(
                f"attnkit mask: {q_length} queries behind a cache, in chunks of {chunks.size} tokens, accepted: a"
                f" prompt with nothing before it, or one query a sequence; {ADVICE}"
            )
        positions = torch.arange(q_length, device=chunks.padding.device)  # (T,)
        sequences = (positions - chunks.padding[:, None]) // chunks.size  # (B, T), padding in chunks of its own
        return Descriptor(layout, cu_seqlens=_cu_seqlens(sequences), model=model)
    return Descriptor(layout, start, ends if causal else stop, model=model)


def _chunk_of(position: int | torch.Tensor, chunks: _Chunked, device: torch.device | str) -> torch.Tensor:
    """Where the chunk of the token at ``position`` begins in each sequence: int32 (B,)."""
    left = chunks.padding.to(device)  # (B,)
    return (left + (position - left) // chunks.size * chunks.size).to(torch.int32)


def _ends(q_end: int | torch.Tensor, batch: int, device: torch.device | str) -> torch.Tensor:
    """The position behind the newest query of each sequence: int32 (B,)."""
    if isinstance(q_end, torch.Tensor):
        return q_end.to(device=device, dtype=torch.int32).expand(batch).contiguous()
    return torch.full((batch,), q_end, dtype=torch.int32, device=device)


def _run(
    attention_mask: torch.Tensor, kv_offset: int, kv_length: int, newest: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The run of valid keys of each row: start (B,), None if all are 0, and stop (B,), None if all are ``kv_length``.

    ``newest`` (B,): where the only query of a decode step ends; its key must be among the valid ones.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attnkit mask: attention_mask has {attention_mask.ndim} axes, accepted: 2")
    valid = attention_mask[:, kv_offset : kv_offset + kv_length].bool()  # (B, n); keys behind it are masked
    n = valid.shape[1]
    if n == 0:
        raise ValueError(
            f"attnkit mask: attention_mask has {attention_mask.shape[1]} columns, accepted: more than {kv_offset},"
            " the keys that the window has left behind"
        )
    index = torch.arange(n, device=valid.device)  # (n,)
    last = torch.where(valid, index + 1, 0).amax(-1).to(torch.int32)  # (B,)
    # A row of padding alone starts behind all of it: its queries see nothing, as other padding does.
    start = torch.where(valid, index, n).amin(-1).to(torch.int32)  # (B,)
    stop = torch.maximum(start, last)  # (B,)
    count = valid.sum(-1)  # (B,)
    holes = (count != stop - start).any()
    hidden = torch.zeros_like(holes) if newest is None else (last < newest).any()
    broken = f"attnkit mask: attention_mask hides tokens between or behind the valid ones; {ACCEPTED}"
    if is_tracing(valid):
        torch._assert_async(~(holes | hidden), broken)
        return start, stop
    has_holes, has_hidden, padded, short = torch.stack(
        (holes, hidden, (start > 0).any(), (count < kv_length).any())
    ).tolist()
    if has_holes:
        raise UnsupportedError(
            f"attnkit mask: attention_mask has holes (masked tokens between valid ones of a sequence); {ACCEPTED}"
        )
    if has_hidden:
        raise UnsupportedError(
            f"attnkit mask: attention_mask hides the newest token of a sequence in a decode step; {ACCEPTED}"
        )
    return start if padded else None, stop if short else None


def _cu_seqlens(sequences: torch.Tensor) -> torch.Tensor:
    """Where the packed sequences (B, T) start and end, one row behind the other: int32 (n + 1,)."""
    B, T = sequences.shape
    first = torch.ones(B, T, dtype=torch.bool, device=sequences.device)  # (B, T) a sequence starts here
    first[:, 1:] = sequences.diff(dim=-1) != 0
    starts = first.flatten().nonzero()[:, 0]  # (n,)
    return torch.cat((starts, starts.new_full((1,), B * T))).to(torch.int32)


def refuse_weights(kwargs: dict[str, Any]) -> None:
    """The ops never hold attention weights; transformers would report none of them as an empty tuple."""
    if kwargs.get("output_attentions"):
        raise UnsupportedError(f"attnkit attention: output_attentions is True, accepted: False; {ADVICE}")


def described(mask: torch.Tensor | Descriptor) -> Descriptor:
    """``mask`` as the mask function made it.

    Raises:
        UnsupportedError: somebody else made ``mask``, or something of it.
    """
    if isinstance(mask, Descriptor):
        return mask
    found = f"a {type(mask).__name__}"
    if isinstance(mask, torch.Tensor):
        found = f"a dense {str(mask.dtype).removeprefix('torch.')} mask of shape {tuple(mask.shape)}"
    raise UnsupportedError(
        f"attnkit attention: attention_mask is {found}; accepted: a 2-D attention_mask given to the model, or none;"
        f" {ADVICE}"
    )
