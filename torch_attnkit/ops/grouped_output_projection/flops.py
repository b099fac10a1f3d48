"""What grouped_output_projection counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call


def flops(c: Call) -> int:
    """One product, two operations a term."""
    channels = c.dim["Ko"] * (1 if c.arg.format == "none" else 2)  # of a row: two a byte
    return 2 * c.dim["Tq"] * c.dim["G"] * c.dim["R"] * channels
