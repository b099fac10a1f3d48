"""What causal_conv1d counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call


def flops(c: Call) -> int:
    """A product and a sum a term."""
    return 2 * c.dim["Tq"] * c.dim["C"] * c.dim["W"]
