"""What flash_attention counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """Of every sequence the keys that each query sees, which stands where it does whatever the lengths are."""
    B, T, S = (c.dim[axis] for axis in ("B", "T", "S"))
    ranges = zip(pairs.contents(c.arg.kv_start, B, 0), pairs.contents(c.arg.kv_len, B, S), strict=True)
    return pairs.attention(c, [(T, S - T, begin, end) for begin, end in ranges], causal=c.arg.causal)
