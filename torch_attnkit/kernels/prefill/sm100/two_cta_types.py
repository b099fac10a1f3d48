"""What the Blackwell prefill kernel is compiled for where two CTAs compute a tile."""

from dataclasses import dataclass
from typing import Any

from cutlass.cute.nvgpu import tcgen05

from .types import ROWS, Config, Depths

CTAS = 2  # of a pair, which computes one tile
LANES = ROWS // CTAS  # rows of the tile in one CTA; half a CTA's threads, for two threads have a row
HALF = 256  # columns of one product's output: tcgen05 takes no more


def element(at: int, upper: Any) -> Any:
    """Which element of its row stands in column ``at`` of the outputs, in lanes 0-63 or (``upper``, 0 or 1) 64-127."""
    product, column = divmod(at, HALF // 2)
    return product * HALF + upper * (HALF // 2) + column


@dataclass(frozen=True, kw_only=True)
class TwoCta(Config):
    """``stages`` counts pieces of K, and pieces of V, in shared memory: 16 KB each in either CTA.

    A piece of K is ``piece`` elements of a block's keys, of which each CTA holds one half; a piece of V is ``part`` of
    a block's keys by ``HALF`` columns, of which each CTA holds one half.
    ``pair`` means two pairs of CTAs, on neighbouring tiles of a head, whose CTAs load half of every piece each.
    """

    cta_group = tcgen05.CtaGroup.TWO
    p_source = tcgen05.OperandSource.SMEM
    ahead = 2  # block n's probabilities wait for block n - 1's product, before which its factors have been read

    @property
    def persistent(self) -> bool:
        """How many clusters of four a chip holds at a time is not known: each computes one work tile."""
        return not self.pair

    @property
    def piece(self) -> int:
        """Elements of the head dim in a piece of Q or K: 256 bytes."""
        return 2048 // self.dtype.width

    @property
    def part(self) -> int:
        """Keys in a piece of V or P: 128 bytes of P, which are swizzled together."""
        return 1024 // self.dtype.width

    @property
    def parts(self) -> int:
        """Of a block's keys."""
        return self.tile_n // self.part

    @property
    def tilers(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        return (ROWS, self.tile_n, self.piece), (ROWS, HALF, self.part)

    @property
    def depths(self) -> Depths:
        return Depths(self.k_pieces, self.stages, self.stages, self.parts)

    @property
    def cluster(self) -> int:
        return CTAS * self.ctas

    @property
    def k_pieces(self) -> int:
        """Of a block."""
        return self.dim // self.piece

    @property
    def halves(self) -> int:
        """Products that make up the output."""
        return self.dim_v // HALF

    @property
    def v_pieces(self) -> int:
        """Of a block."""
        return self.parts * self.halves

    # A product's first columns lie in lanes 0-63, its last ones in lanes 64-127.
    @property
    def scores(self) -> tuple[int, int]:
        return (0, self.tile_n // 2)

    @property
    def columns(self) -> int:
        return self.dim_v // 2

    @property
    def outputs(self) -> tuple[int, ...]:
        return (512 - self.columns,)
