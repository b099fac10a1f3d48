"""DSMEM stores: from registers to a peer CTA's shared memory."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from ..asm import asm


@dsl_user_op
def store_16_async(target: Int32, words: list[Any], barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """``st.async`` of four words to 16 aligned bytes of a peer CTA; ``barrier``, an mbarrier of that CTA, counts the
    bytes. Both are cluster addresses."""
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$2,$3,$4,$5}, [$1];"
    asm(None, [target, barrier, *words], text, memory=True, loc=loc, ip=ip)
