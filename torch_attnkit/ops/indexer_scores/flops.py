"""What indexer_scores counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """One product, two operations a term, over the entries that each token sees; weights and relu are no products."""
    channels = c.dim["Qb"] * (2 if c.arg.format == "mxfp4" else 1)  # of a row: two a byte
    return 2 * c.dim["Hi"] * channels * sum(pairs.contents(c.arg.k_len, c.dim["Tq"], c.dim["S"]))
