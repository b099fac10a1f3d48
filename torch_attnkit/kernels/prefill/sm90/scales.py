"""The scales of E4M3 numbers, one for each sequence and KV head, as a work tile of Hopper's prefill needs them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..types import Inputs, Scalars


def scaled(c: Any, ins: Inputs, scalars: Scalars, tile: Any) -> Scalars:
    """The scalars of a work tile's scores, which are products of codes: with the scales of q and k."""
    if const_expr(not any(c.scales[:2])):
        return scalars
    both = Float32(1.0)
    for scale in ins.scales[:2]:
        if const_expr(scale is not None):
            both *= scale_of(c, ins, scale, tile)
    if const_expr(c.softcap):
        return scalars._replace(cap_slope=scalars.cap_slope * both)
    return scalars._replace(scale_log2=scalars.scale_log2 * both)


def scale_of(c: Any, ins: Inputs, scale: cute.Tensor, tile: Any) -> Float32:
    """A work tile's entry of a scale (sequences, Hkv); of what lies behind the last sequence the last one's."""
    group = Int32(ins.q.shape[1 if c.varlen else 2]) // Int32(scale.shape[1])
    return Float32(scale[cutlass.min(tile.batch, Int32(scale.shape[0]) - 1), tile.head // group])
