"""What flash_attention_varlen counts as for torch.utils.flop_counter."""

import itertools
from collections.abc import Iterable

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def _lengths(c: Call) -> Iterable[tuple[int, int]]:
    """Queries and keys of every sequence. If they cannot be read: the longest that are promised, or all as one."""
    offsets, longest = (c.arg.cu_seqlens_q, c.arg.cu_seqlens_k), (c.arg.max_seqlen_q, c.arg.max_seqlen_k)
    if all(map(pairs.readable, offsets)):
        queries, keys = ([b - a for a, b in itertools.pairwise(t.tolist())] for t in offsets)
        return zip(queries, keys, strict=True)
    return [longest] * c.dim["B"] if min(longest) >= 0 else [(c.dim["Tq"], c.dim["Tk"])]


def flops(c: Call) -> int:
    """Of every sequence the keys that each query sees."""
    return pairs.attention(c, [(t, s - t, 0, s) for t, s in _lengths(c)], causal=c.arg.causal)
