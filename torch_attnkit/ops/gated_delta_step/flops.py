"""What gated_delta_step counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call


def flops(c: Call) -> int:
    """Three products with a state, two operations a term, and its decay."""
    d = c.dim
    return 7 * d["B"] * d["n"] * d["Hv"] * d["K"] * d["V"]
