"""What fp4_moe counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """Three products of M x N for every token and choice that is an expert."""
    chosen = c.arg.indices
    choices = int((chosen >= 0).sum()) if pairs.readable(chosen) else c.dim["Tq"] * c.dim["K"]
    return 6 * choices * c.dim["M"] * c.dim["N"]
