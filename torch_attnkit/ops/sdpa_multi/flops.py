"""What sdpa_multi counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """Of every sequence the keys that each query of its block sees."""
    return pairs.attention(c, pairs.cached(c, c.dim["T"], c.dim["S"]), causal=c.arg.causal)
