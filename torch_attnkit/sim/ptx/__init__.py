"""Runs what CuTeDSL compiles for Hopper and Blackwell on the CPU: its PTX, instruction by instruction, on CPU tensors.

docs/ptx_simulator.md shows how. ``load`` makes it the CudaRuntime of the package's own kernels; ``device``, ``compile``
and ``run`` are for any CuTeDSL function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import launch, library
from .gpu import cute_tensors, device
from .memory import visible
from .runtime import require
from .settings import Launch, Settings, counting, settings
from .targets import GPUS

__all__ = [
    "GPUS", "CheckError", "Launch", "PtxDeadlock", "PtxError", "Settings", "compile", "counting", "device", "load",
    "require", "run", "settings", "visible",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("PtxError", "PtxDeadlock", "CheckError"):
        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(compiled: Any, arch: str) -> Callable[..., None]:
    """Seam 2: a function that runs a kernel compiled for ``arch`` on CPU tensors."""
    return library.load(compiled, arch)


def compile(function: Any, *args: Any, arch: str = "sm100", options: str = "") -> Any:
    """``cute.compile(function, *args, options=options)`` for a simulated GPU; the result is for ``run``.

    Torch tensors among ``args`` become static CuTe tensors of their shape; anything that ``cute.compile`` takes may
    stand beside them or in their place. Raises what ``device`` raises, and the compiler's errors.
    """
    with device(arch):
        import cutlass.cute as cute

        tensors = cute_tensors(args, tvm_ffi="--enable-tvm-ffi" in options)
        return cute.compile(function, *tensors, **({"options": options} if options else {}))


def run(compiled: Any, *args: Any, **options: Any) -> Any:
    """Call a function that ``compile``, or ``cute.compile`` inside ``device``, returned, on CPU tensors.

    ``options`` are fields of ``Settings``: ``run(f, x, out, check=True, seed=3)``. Kernels may touch the storages of
    the tensors given, or of those whose CuTe tensor is given, and nothing else. Raises PtxError for what the PTX ISA
    leaves undefined or forbids, with the line of PTX and of Python; PtxDeadlock when no warp can go on; with ``check``
    CheckError for races, uninitialised reads and misused barriers; TypeError for any other function.
    """
    ptx = getattr(compiled, "__ptx__", None)
    arch = next((name for name, gpu in GPUS.items() if ptx and f".target {gpu.target}" in ptx[:1000]), None)
    if arch is None:
        raise TypeError(
            f"run: got {type(compiled).__name__} without PTX for {' or '.join(g.target for g in GPUS.values())}, "
            "accepted: what cute.compile returned inside sim.ptx.device()"
        )
    with device(arch, **options):
        from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase

        native = isinstance(compiled, TVMFFIJitCompiledFunctionBase)
        return compiled(*(args if native else cute_tensors(args, tvm_ffi=False)))
