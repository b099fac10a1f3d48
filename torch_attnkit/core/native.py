"""The optional C++ half of a call (``csrc/dispatch``): which build is there, what it is given, and when it is off.

Schemas, checks, plans and simulators are Python. Where the extension is there, the kernels that torch's dispatcher
calls for CUDA tensors, and for the CPU's where an op has a row there, are C++: they look a call up by its whole
signature, and repeat the launches that Python made for an earlier call. Without it, or for a call that cannot be
repeated, Python does what it has always done. What lies between Python and the dispatcher is C++, too: ``quicken``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .numerics import calls_no_torch

_PREFIX = "_dispatch_"


def _name(version: str) -> str:
    """The extension's name for a version of torch: C++ classes change from one minor version to the next, so one is
    built for each, and the name is read before any symbol is."""
    major, minor = version.split(".")[:2]
    return f"{_PREFIX}{major}_{minor}"


def _load(folder: Path, version: str) -> tuple[ModuleType | None, str]:
    """The extension in ``folder`` for a version of torch, and a word for explain(): what runs, or why it does not."""
    name = _name(version)
    found = sorted({p.name.split(".")[0] for p in folder.glob(f"{_PREFIX}*") if p.suffix in (".so", ".pyd")})
    if not found:
        return None, "Python (csrc/dispatch is not built)"
    if name not in found:
        built = ", ".join(f.removeprefix(_PREFIX).replace("_", ".") for f in found)
        why = f"csrc/dispatch is built for torch {built}, and this is {version}; install torch_attnkit anew"
    else:
        try:
            return importlib.import_module(f".{name}", __package__), "C++ (csrc/dispatch)"
        except ImportError as error:
            why = f"csrc/dispatch does not load: {error}"
    warnings.warn(f"torch_attnkit: eager calls stay in Python: {why}", RuntimeWarning, stacklevel=2)
    return None, f"Python ({why})"


extension, word = _load(Path(__file__).parent, torch.__version__)
_find_recorder: Callable[[], Any] | None = None


def register_recorder(find: Callable[[], Any]) -> None:
    """Name the module that records launches, which ``core`` does not know: ``torch_attnkit.cuda.repeat``."""
    global _find_recorder
    _find_recorder = find


@functools.cache
def recorder() -> Any:
    """That module, imported by the first call that needs it."""
    assert _find_recorder is not None
    return _find_recorder()


def ready(kernel: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a launch function of the CPU: it calls ``kernel`` (``csrc/cpu``), and nothing else if that takes the call.

    ``kernel.ready`` tells whom C++ calls for it: ``csrc/cpu/ready.h``.
    """

    def mark(launch: Callable[..., None]) -> Callable[..., None]:
        launch.ready = kernel  # type: ignore[attr-defined]
        return calls_no_torch(launch)

    return mark


def setting_matters() -> None:
    """Something beside arguments decides on plans from now on (``target.setting``): C++ asks for it, call by call."""
    if extension is not None:
        extension.ask_for_setting()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Inside this block Python runs every call of the process, as it does without the extension."""
    if extension is not None:
        extension.switch_off(True)
    try:
        yield
    finally:
        if extension is not None:
            extension.switch_off(False)


def quicken(space: str, name: str) -> None:
    """Let C++ read the plain calls of ``torch.ops.<space>.<name>``: exact types in their places, no torch function.

    Any other call takes torch's own way, and below the reading both are one: a boxed call of the dispatcher. The packet
    is replaced before anyone holds it, or an overload of it, and stays an ``OpOverloadPacket``.
    """
    packets = getattr(torch.ops, space)
    packet = getattr(packets, name)
    if extension is None or type(packet) is not torch._ops.OpOverloadPacket or packet._dir:
        return
    quick = extension.quick_packet(packet)
    if quick is not None:
        if not hasattr(type(quick), "__signature__"):  # of all packets, whatever the op
            type(quick).__signature__ = inspect.signature(packet)
        setattr(packets, name, quick)


class Plans(dict[Any, Any]):
    """The plans of an op that Python has made. Who clears them clears what C++ made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated: list[tuple[str, str]] = []  # names and devices of the registered ops whose calls C++ repeats

    def clear(self) -> None:
        super().clear()
        for name in self.repeated:
            assert extension is not None
            extension.clear(*name)
