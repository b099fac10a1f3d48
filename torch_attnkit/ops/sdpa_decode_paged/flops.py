"""What sdpa_decode_paged counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """Of every sequence the keys that its query sees; if its length cannot be read, all slots of its pages."""
    return pairs.attention(c, pairs.cached(c, 1, c.dim["Mp"] * c.dim["Ps"]), causal=True)
