"""What ``mma.py`` is compiled for over caches of E4M3."""

from __future__ import annotations

from dataclasses import dataclass

from torch_attnkit.cuda.smem import fit

from .config import MmaConfig

# Heads (D, Dv): multiples of 32 could be, up to 256, as many columns as Q has registers for.
HEADS = ((64, 64), (128, 128), (256, 256))


@dataclass(frozen=True)
class CodesConfig(MmaConfig):
    """``dtype`` is that of q. A soft cap is compiled in: branches around it would be a quarter of the instructions."""

    capped: bool = False
    scales: tuple[bool, ...] = ()  # which of q's, k's and v's there are; (): none

    @property
    def itemsize(self) -> int:
        return 1

    @property
    def blocks_per_sm(self) -> int:
        """As shared memory and the register file allow; pages of one key take more than 128 registers a thread."""
        threads = 512 if self.heads == 8 and self.page != 1 else 256
        return max(1, min(fit(self.shared_bytes), threads // self.threads))
