"""What linear_decode counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call


def flops(c: Call) -> int:
    """One product, two operations a term."""
    return 2 * c.dim["Tq"] * c.dim["N"] * c.dim["K"]
