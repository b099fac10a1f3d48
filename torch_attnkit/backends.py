"""Registers the runtimes, the hardware's module and the simulator's, and what records the launches that C++ repeats.

Each is imported when it is first asked.
"""

from __future__ import annotations

import functools
import importlib

import torch

from torch_attnkit.core import native, runtimes
from torch_attnkit.core.target import NVIDIA


def register() -> None:
    """Make all of them known to ``core``, which imports none."""
    native.register_recorder(functools.partial(importlib.import_module, "torch_attnkit.cuda.repeat"))
    runtimes.register_origins(lambda plan: importlib.import_module("torch_attnkit.cuda.compile").origins(plan))
    runtimes.register("metal", lambda: torch.mps, simulated=False)
    runtimes.register("metal", functools.partial(importlib.import_module, "torch_attnkit.sim.metal"), simulated=True)
    for arch in NVIDIA:
        runtimes.register(
            arch, functools.partial(importlib.import_module, "torch_attnkit.cuda.driver"), simulated=False
        )
        runtimes.register(arch, functools.partial(importlib.import_module, "torch_attnkit.sim.ptx"), simulated=True)
