"""The scales of E4M3 numbers, one for each sequence and KV head, as a work tile of Hopper's prefill needs them."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr

from ..types import Inputs, Scalars

Q, K, V = range(3)  # in ``Inputs.scales``


def given(c: Any, *which: int) -> bool:
    """Whether a kernel's Config has any of these scales."""
    return any(c.scales[i : i + 1] == (True,) for i in which)


def factor(c: Any, ins: Inputs, at: Any, *which: int) -> Float32:
    """The product of these scales for the sequence and query head of a work tile or of its rows.

    What lies behind the last packed sequence has that one's.
    """
    by = Float32(1.0)
    for i in which:
        if const_expr(given(c, i)):
            table = ins.scales[i]  # (sequences, Hkv)
            heads_of_one = Int32(ins.q.shape[-2]) // Int32(table.shape[1])
            by *= Float32(table[cutlass.min(at.batch, Int32(table.shape[0]) - 1), at.head // heads_of_one])
    return by


def scaled(c: Any, ins: Inputs, scalars: Scalars, at: Any) -> Scalars:
    """The scalars of a work tile's scores, which are products of what q and k hold: with their scales."""
    if const_expr(not given(c, Q, K)):
        return scalars
    name = "cap_slope" if c.softcap else "scale_log2"
    return scalars._replace(**{name: getattr(scalars, name) * factor(c, ins, at, Q, K)})
