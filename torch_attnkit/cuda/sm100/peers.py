"""Between the CTAs of a cluster: the barrier, and bulk copies from one's shared memory to another's."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm


@dsl_user_op
def send(
    target: Int32, source: Int32, at: int, nbytes: int, barrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Each thread's bulk copy of ``nbytes``, a multiple of 16, ``at`` bytes behind both addresses. ``target`` and
    ``barrier``, an mbarrier that counts the bytes, are cluster addresses of one CTA. Generic stores to ``source`` need
    a proxy fence before."""
    text = (
        f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0+{at}], [$1+{at}], {nbytes}, [$2];"
    )
    asm(None, [Int32(target), Int32(source), Int32(barrier)], text, memory=True, loc=loc, ip=ip)


def sync_cluster() -> None:
    """Barrier of all threads of the cluster."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
