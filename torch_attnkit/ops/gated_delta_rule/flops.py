"""What gated_delta_rule counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call


def flops(c: Call) -> int:
    """Three products with a state a token, two operations a term, and its decay."""
    d = c.dim
    return 7 * d["Tq"] * d["Hv"] * d["K"] * d["V"]
