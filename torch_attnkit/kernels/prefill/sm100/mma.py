"""Issuing ``tcgen05`` products, for one CTA or a pair."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from torch_attnkit.cuda.ring import Ring

from .types import Config


def multiply(mma: cute.TiledMma, acc, a, b, *, accumulate) -> None:
    """Issue ``acc (+)= a b``, without waiting for it."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(tcgen05.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(tcgen05.Field.ACCUMULATE, True)


def release(c: Config, ring: Ring, slot: Int32) -> None:
    """Once the products so far are done; in all CTAs of a cluster, which have parts of the slot's next fill."""
    with cute.arch.elect_one():
        mask = cutlass.Int16((1 << c.cluster) - 1) if c.cluster > 1 else None
        tcgen05.commit(ring.empty + slot, mask, c.cta_group)
