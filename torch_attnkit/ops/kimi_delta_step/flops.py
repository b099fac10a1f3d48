"""What kimi_delta_step counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call


def flops(c: Call) -> int:
    """Three products with a state, two operations a term, and its decay."""
    B, n, heads, K, V = (c.dim[axis] for axis in ("B", "n", "Hv", "K", "V"))
    return 7 * B * n * heads * K * V
