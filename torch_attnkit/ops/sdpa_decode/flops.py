"""What sdpa_decode counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """Of every sequence the keys that its query sees."""
    return pairs.attention(c, pairs.cached(c, 1, c.dim["S"]), causal=True)
