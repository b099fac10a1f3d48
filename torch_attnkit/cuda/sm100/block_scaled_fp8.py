"""E4M3 and E2M1 numbers times each other under block scales on Blackwell: ``tcgen05.mma`` of kind mxf8f6f4.

As ``block_scaled.py``, with numbers of a byte: a row of 128 bytes has 128 of them. E2M1 numbers lie in the middle of
their bytes, to which TMA unpacks them (PTX ISA, "Packing formats used in Tensor Memory and Shared Memory"). A product
multiplies 32 numbers of K under one UE8M0 scale of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

from .block_scaled import ROW_BYTES, Format
from .products import ROWS

K = 32  # numbers of a product
_E4M3, _E2M1 = 0, 5


@dataclass(frozen=True)
class Fp8ByFp4(Format):
    """Rows of E4M3, columns of E2M1."""

    kind: str = "mxf8f6f4.block_scale.block32"
    block: int = 32
    e8m0: bool = True
    operands: int = _E4M3 << 7 | _E2M1 << 10  # in an instruction descriptor

    @property
    def tiles(self) -> int:
        return ROW_BYTES // self.tile_elements

    def instruction(self, columns: int, step: int) -> int:
        return (
            step << 4 | self.operands | columns >> 3 << 17 | int(self.e8m0) << 23 | ROWS >> 7 << 27
            | step << 29
        )  # fmt: skip


@dataclass(frozen=True)
class Fp4ByFp8(Fp8ByFp4):
    """Rows of E2M1, columns of E4M3."""

    operands: int = _E2M1 << 7 | _E4M3 << 10
