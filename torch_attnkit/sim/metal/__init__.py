"""Runs Metal sources on the CPU, behind the interface of ``torch.mps.compile_shader``.

A source is compiled by clang with Metal's address spaces, every GPU thread becomes a fiber, and what lanes, simdgroups
and threadgroups do together is done by a small machine in C++. See Settings for how much it checks.
"""

from __future__ import annotations

from .counters import Line, Report
from .errors import SimulationError
from .library import Kernel, Library, Settings, compile_foreign, compile_shader, counting, require, settings

__all__ = [
    "Kernel", "Library", "Line", "Report", "Settings", "SimulationError", "compile_foreign", "compile_shader",
    "counting", "require", "settings",
]  # fmt: skip
