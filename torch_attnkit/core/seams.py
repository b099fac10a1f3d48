"""The two places where a kernel leaves Python, and what stands behind each: hardware or a simulator.

Seam 1 takes Metal source text, seam 2 takes what CuTeDSL compiled. Nothing above a seam knows which side answers, and
``core`` does not know who they are: ``torch_attnkit/backends.py`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .errors import UnsupportedError


class MetalSeam(Protocol):
    """Seam 1, with the interface of ``torch.mps``: ASCII source with our includes inlined to a library of kernels.

    Bad source raises SyntaxError; kernels are called and described as ``torch.mps.compile_shader`` documents it.
    """

    def compile_shader(self, source: str) -> Any: ...


class CudaSeam(Protocol):
    """Seam 2: a compiled CuTeDSL function for ``arch`` in, a callable out that launches it on the target's tensors."""

    def load(self, compiled: Any, arch: str) -> Callable[..., None]: ...


# Where the kernels would come from that planning a call asks for, in words: ``explain`` prints them.
_origins: Callable[[Callable[[], Any]], Iterable[str]] = lambda plan: ()
# (arch, simulated) -> what imports and returns the seam: only a call that needs one pays for it.
_SEAMS: dict[tuple[str, bool], Callable[[], Any]] = {}


def register(arch: str, load: Callable[[], Any], *, simulated: bool) -> None:
    """Name what answers for ``arch``. A simulator's ``load`` raises ModuleNotFoundError in a version without it."""
    _SEAMS[arch, simulated] = load


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
        simulator = _SEAMS[arch, True]()
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torch_attnkit."):
            raise
        raise UnsupportedError(
            f"simulate({arch!r}): this version has no simulator for it ({error.name} is missing); "
            "on CPU tensors outside simulate() the ops run their reference"
        ) from None
    simulator.require()


def backend(arch: str, simulated: bool) -> Any:
    """What answers behind the seam of ``arch``: a MetalSeam for metal, else a CudaSeam."""
    return _SEAMS[arch, simulated]()
