"""How fast a launch could at best be on an Apple chip, from what the simulator counted: modelled, never measured.

Every resource of a chip takes a time for what the launch asks of it, and the launch takes at least the longest of them.
Latency, occupancy, address arithmetic and the cost of a launch are left out, so that real times are longer.

Figures, by core and cycle where not said otherwise:
- arithmetic: 128 multiply-adds in float, and as many in half; 8x8 matrix products run on the same units. Exponentials
  and the like: 32. Between the GPU's cache and a core: 32 bytes. (Philip Turner, metal-benchmarks, for M1 and M2; taken
  to hold for later chips.) The matrix units of the M5 are reached through tensor operations of Metal 4 only, which
  no kernel here uses: they are left out.
- threadgroup memory: 64 bytes. (Chips and Cheese, "iGPU Cache Setups Compared, Including M1", 2022: 671 GB/s on the
  eight cores of an M1.)
- clocks and cores: M1 8 at 1.278 GHz (metal-benchmarks); M4 Max 40 at 1.578 GHz and M5 Max 40 at 1.75 GHz, so that they
  have the 16 and 18 TFLOPS in float that are published for them; Apple states no clock.
- memory: 68.25 GB/s, 546 GB/s and 614 GB/s (LPDDR4X-4266 of 128 bits in the M1; Apple's announcements of the others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .counters import Report

_MULTIPLY_ADDS, _SPECIAL, _CACHE_BYTES, _THREADGROUP_BYTES = 128, 32, 32, 64  # of a core in a cycle


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    ghz: float
    memory: float  # GB/s

    @property
    def cycles(self) -> float:
        """Cycles of all cores in a microsecond."""
        return self.cores * self.ghz * 1e3


CHIPS = (Chip("M1", 8, 1.278, 68.25), Chip("M4 Max", 40, 1.578, 546.0), Chip("M5 Max", 40, 1.75, 614.0))


def times(report: Report, chip: Chip) -> dict[str, float]:
    """Microseconds that each resource of the chip needs for one launch."""
    threadgroup = report.threadgroup_read + report.threadgroup_written
    return {
        "memory": (report.memory_read + report.memory_written) / (chip.memory * 1e3),
        "cache": report.device_bytes / (_CACHE_BYTES * chip.cycles),
        "threadgroup memory": threadgroup / (_THREADGROUP_BYTES * chip.cycles),
        "arithmetic": (report.flops + report.matrix_flops) / (2 * _MULTIPLY_ADDS * chip.cycles),
        "exponentials": report.special / (_SPECIAL * chip.cycles),
    }


def least(reports: Sequence[Report], chip: Chip) -> tuple[float, str]:
    """Microseconds that launches take at least, one after another, and what limits the longest of them."""
    bounds = [max((t, what) for what, t in times(r, chip).items()) for r in reports]
    return sum(t for t, _ in bounds), max(bounds, default=(0.0, "-"))[1]


def line(reports: Sequence[Report]) -> str:
    """The estimates for every chip, for one line of text that says what they are."""
    found = ((chip.name, *least(reports, chip)) for chip in CHIPS)
    return "modelled, not measured: " + ", ".join(f"{name} {us:.3g} us ({what})" for name, us, what in found)
