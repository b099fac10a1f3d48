"""What persistent CTAs that draw their work tiles are compiled for, and what a launch takes beside its tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda import fake

from . import multi_types

_SHARED_MEMORY, _BARRIERS = 227 << 10, 2 << 10  # bytes: of a CTA, and what barriers and notes take of it at most


@dataclass(frozen=True)
class Config(multi_types.Config):
    """What is fixed at compile time."""

    group: int = 0  # query heads of a KV head; 0: no CTA draws

    @property
    def span(self) -> int:
        """Rows of a tile: whole queries, with all their heads."""
        return self.tile_m // self.group * self.group

    @property
    def q_stages(self) -> int:
        """Of rows, so that those of the next work tile are loaded ahead: two if there is room."""
        rows = self.tile_m * self.dim * self.dtype.width // 8
        return 2 if self.staged_bytes + rows + _BARRIERS <= _SHARED_MEMORY // self.per_sm else 1

    @property
    def box_columns(self) -> int:
        """Of a box of rows: what a row of the swizzled layout has, 128 or 64 bytes."""
        return 64 if self.dim % 64 == 0 and self.dim_v % 64 == 0 else 32


@dataclass(frozen=True)
class TensorConfig(Config):
    """The same over keys in tensors, dense or packed. What few calls have is left out of the others' masks."""

    window: bool = False
    sink_tokens: bool = False
    kv_len: bool = False
    kv_start: bool = False
    packed: bool = False

    ends_at_kv_len = False

    @property
    def padded(self) -> bool:
        return self.kv_len or self.kv_start or self.packed or self.window


class Draws(NamedTuple):
    """Of which persistent CTAs draw their work tiles, and how many CTAs there are at most."""

    count: cute.Tensor  # one zero
    ctas: Int32
    section: Int32  # of dense batches: KV heads whose keys share the L2, and whose tiles are drawn together


def draws() -> Draws:
    """Stand-ins for these."""
    return Draws(fake.tensor("i32", (None,), (None,), align=4), Int32(0), Int32(0))
