"""Who answers behind the two seams, the hardware's module and the simulator's, and who records what C++ repeats.

Each is imported when it is first asked.
"""

from __future__ import annotations

import functools
import importlib

import torch

from torch_attnkit.core import native, seams


def register() -> None:
    """Make all of them known to ``core``, which imports none."""
    native.register_recorder(functools.partial(importlib.import_module, "torch_attnkit.cuda.repeat"))
    seams.register_origins(lambda plan: importlib.import_module("torch_attnkit.cuda.compile").origins(plan))
    seams.register("metal", lambda: torch.mps, simulated=False)
    seams.register("metal", functools.partial(importlib.import_module, "torch_attnkit.sim.metal"), simulated=True)
    for arch in ("sm90", "sm100"):
        seams.register(arch, functools.partial(importlib.import_module, "torch_attnkit.cuda.driver"), simulated=False)
        seams.register(arch, functools.partial(importlib.import_module, "torch_attnkit.sim.ptx"), simulated=True)
