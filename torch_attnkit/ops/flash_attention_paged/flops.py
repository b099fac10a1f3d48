"""What flash_attention_paged counts as for torch.utils.flop_counter."""

import itertools
from collections.abc import Iterable

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def _lengths(c: Call) -> Iterable[tuple[int, int]]:
    """Queries and keys of every sequence. If they cannot be read: the longest that are promised, or all that fits."""
    offsets, keys = c.arg.cu_seqlens_q, c.arg.kv_len
    if pairs.readable(offsets) and pairs.readable(keys):
        return zip((b - a for a, b in itertools.pairwise(offsets.tolist())), keys.tolist(), strict=True)
    most = c.dim["Mp"] * c.dim["Ps"]
    longest = c.arg.max_seqlen_k if c.arg.max_seqlen_k >= 0 else most
    return [(c.arg.max_seqlen_q, longest)] * c.dim["B"] if c.arg.max_seqlen_q >= 0 else [(c.dim["Tq"], longest)]


def flops(c: Call) -> int:
    """Of every sequence the keys that each query sees; one before the first key is not there."""
    lengths = [(min(t, s), s) for t, s in _lengths(c)]
    return pairs.attention(c, [(t, s - t, 0, s) for t, s in lengths], causal=c.arg.causal)
