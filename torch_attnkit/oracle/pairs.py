"""How many pairs of a query and a key attention looks at, from positions and lengths, and what they cost.

What ``oracle/attention.visible`` shows as a mask, counted. Lengths are read from their tensors where these hold
numbers; a fake or meta tensor holds none, and then whatever fits counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from torch_attnkit.core import Call

Sequence = tuple[int, int, int, int]  # queries, the position of the first, the first key, the key behind the last


def readable(tensor: torch.Tensor | None) -> bool:
    """Whether there are numbers behind a tensor: not those of a fake one, a tracer's or a meta device's."""
    return tensor is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


def contents(tensor: torch.Tensor | None, count: int, otherwise: int) -> list[int]:
    """The contents of an index tensor (count,), or ``count`` times ``otherwise`` if there are none to read."""
    if tensor is None or not readable(tensor):
        return [otherwise] * count
    found: list[int] = tensor.tolist()
    return found


@functools.lru_cache(maxsize=4096)
def seen(sequence: Sequence, causal: bool, window: int, sink_tokens: int) -> int:
    """The pairs of one sequence. Queries stand behind one another; the rest is as in ``visible``."""
    queries, position, begin, end = sequence
    pairs = 0
    for p in range(position, position + queries):
        last = min(end, p + 1) if causal else end  # behind the last key that may be seen
        if window < 0:
            pairs += max(0, last - begin)
            continue
        near = max(begin, p - window + 1)
        far = last if causal else min(last, p + window)
        first = max(begin, min(begin + sink_tokens, last))  # behind the first keys, which are seen from anywhere
        pairs += max(0, far - near) + (first - begin) - max(0, min(first, far) - near)
    return pairs


def attention(c: Call, sequences: Iterable[Sequence], *, causal: bool) -> int:
    """Two products, two operations a term, over the pairs of all sequences and heads."""
    pairs = sum(seen(s, causal, c.arg.window, c.arg.sink_tokens) for s in sequences)
    return 2 * c.dim["Hq"] * pairs * (c.dim["D"] + c.dim["Dv"])


def cached(c: Call, queries: int, keys: int) -> list[Sequence]:
    """The sequences of an op whose last query stands at the end of a cache; one before its start is not there."""
    lengths = contents(c.arg.kv_len, c.dim["B"], keys)
    starts = contents(c.arg.kv_start, c.dim["B"], 0)
    queries_seen = [min(queries, n) for n in lengths]
    return [(t, n - t, first, n) for t, n, first in zip(queries_seen, lengths, starts, strict=True)]
