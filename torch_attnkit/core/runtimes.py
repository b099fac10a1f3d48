"""The runtimes that load and launch kernels: for each architecture the hardware's and a simulator's.

A MetalRuntime takes Metal source text, a CudaRuntime what CuTeDSL compiled. Callers do not know whether hardware or a
simulator answers, and ``core`` imports neither: ``torch_attnkit/backends.py`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .errors import UnsupportedError


class MetalRuntime(Protocol):
    """The interface of ``torch.mps``: ASCII source with our includes inlined to a library of kernels.

    Bad source raises SyntaxError; kernels are called and described as ``torch.mps.compile_shader`` documents it.
    """

    def compile_shader(self, source: str) -> Any: ...


class CudaRuntime(Protocol):
    """Loads a compiled CuTeDSL function for ``arch``: a callable that launches it on the target's tensors."""

    def load(self, compiled: Any, arch: str) -> Callable[..., None]: ...


# Where the kernels would come from that planning a call asks for, in words: ``explain`` prints them.
_origins: Callable[[Callable[[], Any]], Iterable[str]] = lambda plan: ()
# (arch, simulated) -> what imports and returns the runtime: only a call that needs one pays for it.
_RUNTIMES: dict[tuple[str, bool], Callable[[], Any]] = {}


def register(arch: str, load: Callable[[], Any], *, simulated: bool) -> None:
    """Name what answers for ``arch``. A simulator's ``load`` raises ModuleNotFoundError in a version without it."""
    _RUNTIMES[arch, simulated] = load


def register_origins(origins: Callable[[Callable[[], Any]], Iterable[str]]) -> None:
    """Name what answers for compiled kernels."""
    global _origins
    _origins = origins


def origins(plan: Callable[[], Any]) -> Iterable[str]:
    """A line for each kernel of a GPU that ``plan()`` asks for, and where it would come from."""
    return _origins(plan)


def require_simulator(arch: str) -> None:
    """Raise UnsupportedError, naming what is missing and the cure, unless ``arch`` can be simulated here."""
    try:
        simulator = _RUNTIMES[arch, True]()
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torch_attnkit."):
            raise
        raise UnsupportedError(
            f"simulate({arch!r}): this version has no simulator for it ({error.name} is missing); "
            "on CPU tensors outside simulate() the ops run their reference"
        ) from None
    simulator.require()


def of(arch: str, simulated: bool) -> Any:
    """The runtime of ``arch``: a MetalRuntime for metal, else a CudaRuntime."""
    return _RUNTIMES[arch, simulated]()
