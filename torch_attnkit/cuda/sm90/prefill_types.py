"""What a prefill kernel is compiled for, and the groups of arguments that its functions pass on."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..prefill_types import Features


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


class Loads(NamedTuple):
    """The three TMA atoms and the tensors of coordinates that go with them."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # (T, D, Hq, B); packed: (T, D, Hq)
    k_atom: cute.CopyAtom
    k: cute.Tensor  # (S, D, Hkv, B); packed: (S, D, Hkv)
    v_atom: cute.CopyAtom
    v: cute.Tensor  # (S, Dv, Hkv, B); packed: (S, Dv, Hkv)


class Place(NamedTuple):
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
