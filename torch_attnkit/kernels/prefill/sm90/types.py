"""What a prefill kernel is compiled for, and the groups of arguments that its functions pass on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int32

from ..blocks import Sequence
from ..types import Features


@dataclass(frozen=True, kw_only=True)
class Config(Features):
    """What is fixed at compile time."""

    tile_m: int
    stages: int
    q_stages: int
    turns: bool = True
    late_rescale: bool = False
    pair: bool = False  # two CTAs, on neighbouring heads that share keys, load half of K and V each, for both

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return 2 if self.pair else 1

    @property
    def out_dtype(self) -> Any:
        """Of E4M3 inputs bf16."""
        return self.dtype if self.dtype.width > 8 else BFloat16

    @property
    def lift(self) -> int:
        """Probabilities, their sums and the output so far are 2^lift times what they stand for: rounded to E4M3,
        whose largest number is 448, more small ones remain."""
        return 0 if self.dtype.width > 8 else 8


class Loads(NamedTuple):
    """The three TMA atoms and the tensors of coordinates that go with them."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # (T, D, Hq, B); packed: (T, D, Hq)
    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B); packed: (S, D, Hkv)
    v_atom: cute.CopyAtom
    v: cute.Tensor  # (S, Dv, Hkv, B); packed: (S, Dv, Hkv); of E4M3 Dv before S


class WorkTile(NamedTuple):
    """What the producer notes about a work tile."""

    row: Int32  # number of the tile of M queries within its sequence; -1: there is none left
    head: Int32
    batch: Int32
    seq: Sequence

    @classmethod
    def of(cls, values: list[Int32]) -> "WorkTile":
        """From the ``NOTE`` numbers of a note."""
        return cls(*values[:3], Sequence(*values[3:]))

    def note(self) -> list[Int32]:
        return [self.row, self.head, self.batch, *self.seq]


NOTE = len(WorkTile._fields) - 1 + len(Sequence._fields)


class OutputRows(NamedTuple):
    """Where a lane's results go: its first row within the sequence, which has ``tokens`` rows from ``q0`` on."""

    batch: Int32
    head: Int32
    q0: Int32
    row: Int32
    tokens: Int32


class Layouts(NamedTuple):
    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
