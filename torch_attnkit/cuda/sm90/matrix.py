"""``stmatrix``: 8 x 8 tiles of 16-bit values from a warp's registers to shared memory."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from torch_attnkit.cuda.asm import asm


@dsl_user_op
def store_transposed(address: Int32, tiles: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """``stmatrix.trans`` of 1, 2 or 4 tiles, of which a lane holds the pair of row ``lane // 4``: columns become rows
    of 16 bytes. Lane l gives the address of row ``l % 8`` of tile ``l // 8``."""
    registers = ",".join(f"${i + 1}" for i in range(len(tiles)))
    text = f"stmatrix.sync.aligned.m8n8.x{len(tiles)}.trans.shared.b16 [$0], {{{registers}}};"
    asm(None, [address, *tiles], text, memory=True, loc=loc, ip=ip)
