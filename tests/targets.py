"""Targets of tests that go through several: what one needs here, and a block in which calls run on it."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from torch_attnkit import simulate
from torch_attnkit.core import runtimes
from torch_attnkit.core.errors import UnsupportedError

TARGETS = ("cpu", "metal", "sm90", "sm100")


def needs(arch: str) -> None:
    """Skip without what simulates ``arch``."""
    if arch == "cpu":
        return
    try:
        runtimes.require_simulator(arch)
    except UnsupportedError as error:
        pytest.skip(str(error))
    if arch.startswith("sm") and not all(map(importlib.util.find_spec, ("nvidia_cutlass_dsl", "tvm_ffi"))):
        pytest.skip("the PTX simulator runs what nvidia-cutlass-dsl and apache-tvm-ffi compile")


def on(arch: str) -> contextlib.AbstractContextManager[object]:
    """A block in which calls with tensors of the CPU run on the simulated ``arch``, or on the CPU itself."""
    return contextlib.nullcontext() if arch == "cpu" else simulate(arch)
