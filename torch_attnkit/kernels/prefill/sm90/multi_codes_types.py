"""What the kernel for blocks of queries over E4M3 is compiled for."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cutlass import BFloat16, Int32

from . import multi_types


@dataclass(frozen=True)
class Config(multi_types.Config):
    """What is fixed at compile time. ``stages`` are those of K, and of V as it comes."""

    turned: int = 2  # stages of V turned around
    promote: bool = True  # sums of several blocks of keys are added up in float32

    turning_warps: ClassVar[int] = 3  # those that do not load
    scales: ClassVar[tuple[bool, ...]] = (True, True, True)  # where a call has none they are ones

    @property
    def out_dtype(self) -> Any:
        return BFloat16

    @property
    def lift(self) -> int:
        """Probabilities, their sums and the output so far are 2^lift times what they stand for, see ``types.py``."""
        return 8

    @property
    def padded(self) -> bool:
        """Keys at which nobody looks are zeros since V was turned around."""
        return False

    @property
    def staged_bytes(self) -> int:
        """Of Q, K, V as it comes and V turned around in shared memory."""
        return self.tile_m * self.dim + self.tile_n * (self.stages * (self.dim + self.dim_v) + self.turned * self.dim_v)


class Place(NamedTuple):
    """Of a work tile, for ``scales.py``."""

    batch: Int32
    head: Int32  # a query head
