"""From a launch of compiled host code to a run of the PTX that belongs to it."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from . import memory
from .runtime import machine, runtime
from .settings import Launch, current, note
from .targets import processors_of


def __getattr__(name: str) -> type[Exception]:
    """``PtxError`` and ``PtxDeadlock`` are the machine's; it is loaded when they are first asked for."""
    if name in ("PtxError", "PtxDeadlock"):
        found: type[Exception] = getattr(machine(), name)
        return found
    if name == "CheckError":
        return _check_error()
    raise AttributeError(name)


@functools.cache
def _check_error() -> type[Exception]:
    return type(
        "CheckError",
        (machine().PtxError,),
        {"__doc__": "A checked run found races, uninitialised reads or misused barriers.", "__module__": __name__},
    )


class Program:
    """The PTX of one compilation. ``content`` has its device code in it: a cubin, or a library that embeds one."""

    def __init__(self, content: bytes, text: str) -> None:
        self.content, self.text = content, text
        self._kernels: dict[str, Any] = {}

    @cached_property
    def module(self) -> Any:
        return machine().Module(self.text)

    def kernel(self, name: str) -> Any:
        if name not in self._kernels:
            self._kernels[name] = self.module.kernel(name)
        return self._kernels[name]


_programs: list[Program] = []
_loaded: dict[int, Program] = {}  # by the runtime's number of the library
_known: set[int] = set()
_thread = threading.local()


def register(content: bytes, ptx: str) -> None:
    """Make known which PTX the device code inside ``content`` was assembled from."""
    _install()
    digest = hash((content, ptx))
    if digest not in _known:
        _known.add(digest)
        _programs.append(Program(content, ptx))


@functools.cache
def _install() -> None:
    runtime().install(_on_launch, machine().tensor_map_encode)


def _program(library: int) -> Program:
    """Matched by the bytes of the device code: different kernels share names."""
    found = _loaded.get(library)
    if found is None:
        image = runtime().image(library)
        found = next((p for p in reversed(_programs) if p.content in image or image in p.content), None)
        if found is None:
            raise RuntimeError("launch of device code whose PTX is unknown: compile it inside sim.ptx.device()")
        _loaded[library] = found
    return found


def _on_launch(*record: Any) -> tuple[str, str] | None:
    """What the runtime calls: an exception must not cross compiled code, so it is kept for ``raising``."""
    try:
        _run(*record)
        return None
    except BaseException as error:
        _thread.error = error
        return type(error).__name__, str(error)


@contextmanager
def raising() -> Iterator[None]:
    """Calls of compiled code go in here: the simulator's own exception comes out, instead of a CUDA error code."""
    _thread.error = None
    try:
        yield
    except Exception:
        if _thread.error is not None:
            raise _thread.error from None
        raise
    finally:
        error, _thread.error = _thread.error, None
    if error is not None:
        raise error


def _run(
    library: int, name: str, grid: Any, block: Any, cluster: Any, shared: int, cooperative: bool, arguments: int
) -> None:
    program = _program(library)
    kernel, target, how = program.kernel(name), program.module.target, current()
    addresses = (ctypes.c_void_p * len(kernel.params)).from_address(arguments)
    params = bytearray(kernel.param_bytes)
    for (_, offset, size, _), address in zip(kernel.params, addresses, strict=True):
        params[offset : offset + size] = ctypes.string_at(address, size)
    processors = how.processors or processors_of(target)
    result = kernel.launch(
        grid=grid, block=block, cluster=cluster, dynamic_shared=shared, params=bytes(params), ranges=memory.ranges(),
        check=how.check, seed=how.seed, poison=how.poison, threads=how.threads, limit=how.limit,
        removed=list(how.removed), processors=processors, waive=list(how.waive), strict=list(how.strict),
    )  # fmt: skip
    notes = tuple(r for r in result.reports if r.startswith("note: "))
    wrong = [r for r in result.reports if not r.startswith("note: ")]
    note(Launch(name, target, grid, block, cluster, shared, result.counters, notes))
    if wrong:
        raise _check_error()(f"{name}: {len(wrong)} findings\n" + "\n".join(wrong))
