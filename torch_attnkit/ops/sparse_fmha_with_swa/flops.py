"""What sparse_fmha_with_swa counts as for torch.utils.flop_counter."""

from torch_attnkit.core import Call
from torch_attnkit.oracle import pairs


def flops(c: Call) -> int:
    """Two products, two operations a term, over the keys of the windows and the entries that are attended."""
    tokens = c.dim["Tq"]
    window: int = c.arg.window
    near = sum(min(window, end) for end in pairs.contents(c.arg.swa_end, tokens, c.dim["S"]))
    return 4 * c.dim["Hq"] * c.dim["D"] * (near + _entries(c, tokens))


def _entries(c: Call, tokens: int) -> int:
    """The compressed entries of all tokens."""
    chosen, limits = c.arg.topk_indices, c.arg.compressed_len
    if c.arg.compressed_kv is None:
        return 0
    if chosen is None:
        return sum(pairs.contents(limits, tokens, c.dim["C"]))
    if not pairs.readable(chosen):
        return tokens * int(chosen.shape[1])
    valid = chosen >= 0  # (Tq, K)
    if limits is not None and pairs.readable(limits):
        valid &= chosen < limits[:, None]
    return int(valid.sum())
