"""Bytes from one CTA's shared memory to another's of its cluster, without registers. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm


@dsl_user_op
def send(address: Int32, cta: Int32, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """A thread's copy of ``nbytes``, a multiple of 16, to where CTA ``cta`` of the cluster has the same ``address``;
    that CTA's mbarrier at ``barrier`` counts them. What generic stores left there needs a proxy fence before."""
    text = (
        "{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, $0, $1; mapa.shared::cluster.u32 bar, $2, $1; "
        f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [$0], {nbytes}, [bar]; }}"
    )
    asm(None, [Int32(address), Int32(cta), Int32(barrier)], text, memory=True, loc=loc, ip=ip)
