"""The GPUs that can be simulated: a target joins with its line here, and in csrc/sim/ptx/machine/target.cpp.

A line stands alone: what a row of the table is seen with counts those of its own target (torch_attnkit/digest.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .runtime import machine


@dataclass(frozen=True)
class Gpu:
    """What a simulated GPU says of itself; sizes in bytes. ``target``: the GPU's own, of PTX."""

    target: str
    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    l2: int

    @property
    def limits(self) -> Any:
        """What a multiprocessor has (csrc/sim/ptx/machine/target.cpp): ``shared``, ``threads_of_processor``, ..."""
        return machine().limits(self.target)


GPUS = {
    "sm80": Gpu("sm_80", "simulated A100", (8, 0), 108, 80 << 30, 40 << 20),
    "sm89": Gpu("sm_89", "simulated RTX 4090", (8, 9), 128, 24 << 30, 72 << 20),
    "sm90": Gpu("sm_90a", "simulated H200", (9, 0), 132, 141 << 30, 50 << 20),
    "sm100": Gpu("sm_100a", "simulated B200", (10, 0), 148, 180 << 30, 126 << 20),
    "sm120": Gpu("sm_120a", "simulated RTX 5090", (12, 0), 170, 32 << 30, 96 << 20),
}


def processors_of(target: str) -> int:
    """Multiprocessors of the GPU that PTX for ``target`` is run on: of its number, else a B200's."""
    same = (gpu.processors for gpu in GPUS.values() if gpu.target.rstrip("af") == target.rstrip("af"))
    return next(same, GPUS["sm100"].processors)
