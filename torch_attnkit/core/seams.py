"""The two places where a kernel leaves Python, and what stands behind each: hardware or a simulator.

Seam 1 takes Metal source text, seam 2 takes what CuTeDSL compiled. Nothing above a seam knows which side answers.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .errors import UnsupportedError

_SIMULATORS = {"metal": "torch_attnkit.sim.metal"} | dict.fromkeys(("sm90", "sm100"), "torch_attnkit.sim.ptx")


class MetalSeam(Protocol):
    """Seam 1, with the interface of ``torch.mps``: ASCII source with our includes inlined to a library of kernels.

    Bad source raises SyntaxError; kernels are called and described as ``torch.mps.compile_shader`` documents it.
    """

    def compile_shader(self, source: str) -> Any: ...


class CudaSeam(Protocol):
    """Seam 2: a compiled CuTeDSL function for ``arch`` in, a callable out that launches it on the target's tensors."""

    def load(self, compiled: Any, arch: str) -> Callable[..., None]: ...


def require_simulator(arch: str) -> None:
    """Raise UnsupportedError, naming what is missing and the cure, unless ``arch`` can be simulated here."""
    parent = importlib.util.find_spec("torch_attnkit.sim")  # looking inside a package that is missing would raise
    if parent is None or importlib.util.find_spec(_SIMULATORS[arch]) is None:
        raise UnsupportedError(
            f"simulate({arch!r}): this version has no simulator for it ({_SIMULATORS[arch]} is missing); "
            "on CPU tensors outside simulate() the ops run their reference"
        )
    importlib.import_module(_SIMULATORS[arch]).require()


def backend(arch: str, simulated: bool) -> Any:
    """What answers behind the seam of ``arch``: a MetalSeam for metal, else a CudaSeam."""
    if simulated:
        return importlib.import_module(_SIMULATORS[arch])
    return torch.mps if arch == "metal" else importlib.import_module("torch_attnkit.cuda.driver")
