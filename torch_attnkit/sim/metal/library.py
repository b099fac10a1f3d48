"""A compiled source and its kernels, with the object protocol of ``torch.mps.compile_shader``."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from torch_attnkit.core import cache
from torch_attnkit.core.errors import UnsupportedError

from . import compiler, errors, source
from .binding import LISTED, Bound, Formal, bind, regions
from .constants import Value
from .counters import Report
from .errors import SimulationError
from .fresh import Tracker

MAX_THREADGROUP_BYTES = 32768
MODES = ("fast", "checked", "counting")
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_machine_lock = threading.Lock()  # there is one machine


@dataclass(frozen=True)
class Settings:
    """``mode``: fast, checked (races, bounds and uninitialised reads) or counting (checked, with counters).

    ``strict`` makes a collective on part of a simdgroup's lanes an error, also where the others have returned, and in
    the checked modes unordered writes of one value to one place. ``turns`` are those of loops in one threadgroup, all
    threads together, past which they count as endless. ``version`` is the value of ``__METAL_VERSION__``, ``cache``
    the size in bytes of the cache before memory that counting models; 8 MiB is the M1's. Under ``lockstep`` every
    operation of a simdgroup orders its lanes' accesses to threadgroup memory, as simdgroup_barrier does: Metal does not
    promise that, and code of others relies on it.
    """

    mode: str = "fast"
    strict: bool = False
    turns: int = 1 << 30
    version: int = 320
    cache: int = 8 << 20
    lockstep: bool = False


_settings: ContextVar[Settings] = ContextVar("attnkit_metal_settings", default=Settings())  # noqa: B039 (immutable)
_reports: ContextVar[list[Report] | None] = ContextVar("attnkit_metal_reports", default=None)


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Run kernels with other settings inside this block; ``changes`` are fields of Settings.

    Inside a checked mode, what tensors of ``torch.empty`` hold is tracked: a tensor from outside counts as written.
    """
    old = _settings.get()
    new = replace(old, **changes)
    if new.mode not in MODES:
        raise ValueError(f"settings: mode is {new.mode!r}, accepted: {', '.join(MODES)}")
    token = _settings.set(new)
    try:
        with Tracker() if old.mode == "fast" != new.mode else nullcontext():
            yield new
    finally:
        _settings.reset(token)


@contextmanager
def counting() -> Iterator[list[Report]]:
    """Count what every launch inside this block does; a Report a launch is appended to the list."""
    reports: list[Report] = []
    token = _reports.set(reports)
    try:
        with settings(mode="counting"):
            yield reports
    finally:
        _reports.reset(token)


def machine() -> Any:
    """The C++ part, which an installation without a compiler may lack."""
    try:
        from torch_attnkit.sim import _metal  # type: ignore[attr-defined]
    except ImportError as error:
        raise UnsupportedError(
            f"the Metal simulator's extension (torch_attnkit.sim._metal) has not been built: {error}"
        ) from None
    return _metal


@functools.cache
def require() -> None:
    """Raise UnsupportedError, with the cure, unless all that the simulator needs is installed."""
    machine()
    compiler.require()


class _Loaded:
    """A kernel built in one way."""

    def __init__(self, kernel: Kernel, how: compiler.Variant) -> None:
        library = kernel._library
        self.built = compiler.build(library._text, library._unit, kernel._entry, how, library._version)
        self.object = machine().Kernel(str(cache.checked(self.built.path)))

    def formals(self, parameters: Sequence[source.Parameter]) -> list[Formal]:
        return [Formal(p, *d) for p, d in zip(parameters, self.object.parameters, strict=True)]


class Kernel:
    """A kernel of a library. Call it as ``torch.mps`` kernels are called, with CPU tensors."""

    def __init__(self, library: Library, entry: source.Entry, values: Mapping[int, Value] = _NOTHING) -> None:
        self._library, self._entry = library, entry
        self._values = tuple(sorted(values.items()))
        self._loaded: dict[compiler.Variant, _Loaded] = {}
        used = self._load(_settings.get()).built.threadgroup_bytes
        if used > MAX_THREADGROUP_BYTES:
            raise RuntimeError(
                f"Failed to create pipeline state object, error: {entry.host}: threadgroup memory size ({used}) "
                f"exceeds the maximum threadgroup memory allowed ({MAX_THREADGROUP_BYTES})"
            )

    def __repr__(self) -> str:
        return f"<simulated Metal kernel {self._entry.host}>"

    def _load(self, how: Settings) -> _Loaded:
        variant = compiler.Variant(how.mode, how.lockstep, self._values)
        if variant not in self._loaded:
            self._loaded[variant] = _Loaded(self, variant)
        return self._loaded[variant]

    @property
    def _any(self) -> _Loaded:
        return next(iter(self._loaded.values()))

    @cached_property
    def _formals(self) -> list[Formal]:
        declaration = self._library._unit.declarations[self._entry.kernel]
        return self._any.formals(declaration.parameters)

    @property
    def max_threads_per_threadgroup(self) -> int:
        """The declared limit or 1024. A GPU may allow fewer, depending on the registers that a kernel takes."""
        return int(self._any.object.thread_limit)

    @property
    def thread_execution_width(self) -> int:
        return 32

    @property
    def static_thread_group_memory_length(self) -> int:
        return self._any.built.threadgroup_bytes

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | dict[int, str] | None = None,
        error_buf_idx: int | None = None,
        threadgroup: Mapping[int, int] = _NOTHING,
    ) -> None:
        """Run the kernel on ``threads`` threads in all; see ``torch.mps.compile_shader``.

        ``threadgroup`` has the bytes of each ``[[threadgroup(i)]]``, which torch.mps cannot give; only a library of
        ``compile_foreign`` has such parameters, and only there None stands for a buffer that is left unbound.

        Raises SimulationError for what Metal leaves undefined, and then writes to no tensor. What the kernel itself
        reports to the error buffer is raised here, as there is nothing to synchronise with later.
        """
        grid = _extent(threads)
        if grid is None:
            first = next((a for a in args if isinstance(a, torch.Tensor)), None)
            grid = None if first is None else (first.numel(),)
        if grid is None:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        group = self._group(grid, _extent(group_size))
        reported = None if error_buf_idx is None else (int(error_buf_idx), errors.buffer())
        bound = bind(self._entry.host, self._formals, args, arg_casts, reported, self._library._host is not None)
        given = self._given(threadgroup)
        if 0 in grid:
            return
        how = _settings.get()
        memory_fault, message = self._run(how, grid, group, bound, given)
        if message and memory_fault and how.mode == "fast":
            # A fault of the processor names no line. The tensors are as they were, so that it can be asked again.
            message = self._run(replace(how, mode="checked"), grid, group, bound, given)[1] or message
        if message:
            raise SimulationError(message)
        if reported is not None:
            errors.raise_reported(reported[1])

    def _group(self, grid: tuple[int, ...], group: tuple[int, ...] | None) -> tuple[int, ...]:
        limit = self.max_threads_per_threadgroup
        if group is not None and len(group) != len(grid):
            raise RuntimeError(f"threads has {len(grid)} dimensions and group_size {len(group)}, expected as many")
        if group is None:
            group = (min(grid[0], limit) if len(grid) == 1 else limit, *(1,) * (len(grid) - 1))
        product = 1
        for n in group:
            product *= n
        if product > limit:
            raise ValueError(f"Threadgroup size exceeds {limit} limit")
        if product < 1 and 0 not in grid:
            raise ValueError(f"group_size is {group}: every dimension must be at least 1")
        return group

    def _given(self, threadgroup: Mapping[int, int]) -> list[tuple[str, int]]:
        """Name and bytes of the threadgroup memory that a launch gives, by index; the names are the parameters'."""
        declaration = self._library._unit.declarations[self._entry.kernel]
        first = source.THREADGROUP
        names = {p.slot - first: p.name for p in declaration.parameters if p.slot >= first}
        if set(names) != set(threadgroup):
            raise ValueError(
                f"{self._entry.host}: threadgroup memory is given for {sorted(threadgroup)}, it has "
                f"[[threadgroup(i)]] of {sorted(names)}"
            )
        for index, size in threadgroup.items():
            if size <= 0 or size % 16:
                raise ValueError(f"{self._entry.host}: threadgroup({index}) of {size} bytes, not a multiple of 16")
        return [(names.get(i, ""), threadgroup.get(i, 0)) for i in range(max(names, default=-1) + 1)]

    def _run(
        self, how: Settings, grid: tuple[int, ...], group: tuple[int, ...], bound: Any, given: list[tuple[str, int]]
    ) -> tuple[bool, str]:
        loaded = self._load(how)
        three = lambda dims: (*dims, *(1,) * (3 - len(dims)))
        variables = [(v.name, v.offset, v.bytes) for v in loaded.built.variables]
        used = -(-loaded.built.threadgroup_bytes // 16) * 16 if given else loaded.built.threadgroup_bytes
        for name, size in given:
            variables.append((name, used, size))
            used += size
        if used > MAX_THREADGROUP_BYTES:
            raise ValueError(
                f"{self._entry.host}: {used} bytes of threadgroup memory, at most {MAX_THREADGROUP_BYTES} are allowed"
            )
        options = {"checked": how.mode != "fast", "counting": how.mode == "counting", "strict": how.strict,
                   "turns": how.turns, "cache": how.cache, "lockstep": how.lockstep}  # fmt: skip
        with _machine_lock:
            ok, memory_fault, message = machine().run(
                loaded.object, three(grid), three(group), regions(bound), variables, used, options,
            )  # fmt: skip
            counted = machine().counters() if how.mode == "counting" and ok else None
        reports = _reports.get()
        if counted is not None and reports is not None:
            names = _names(self._formals, bound)
            reports.append(Report.of(self._entry.host, counted, names, loaded.built.sites, self._library._lines))
        return memory_fault, "" if ok else f"{self._entry.host}: {self._located(message, loaded)}"

    def _located(self, message: str, loaded: _Loaded) -> str:
        """The message with marks of places replaced by line, text and the calls that led there."""

        def words(match: re.Match[str]) -> str:
            place = loaded.built.sites[int(match[1])]
            if not place:
                return ""
            *outer, (line, _) = place
            calls = "".join(f", called from line {at}" for at, _ in reversed(outer))
            return f" at line {line} ({self._library._lines[line - 1].strip()}){calls}"

        return re.sub(r" \{site (\d+)\}", words, message)


def _names(formals: Sequence[Formal], bound: Sequence[Bound]) -> dict[int, str]:
    """Names of the device parameters by slot. Traffic goes by address: those of one tensor are counted as one."""
    place = {b.slot: (b.address, b.bytes) for b in bound}
    device = {f.parameter.slot: f.parameter.name for f in formals if f.space == 1 and f.parameter.slot in place}
    names = {f.parameter.slot: f.parameter.name for f in formals}
    device |= {b.slot: f"{names[b.slot // LISTED - 1]}[{b.slot % LISTED}]" for b in bound if b.slot >= LISTED}
    return {slot: "=".join(n for s, n in device.items() if place[s] == place[slot]) for slot in device}


def _extent(value: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    out = (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 0 < len(out) < 4:
        raise RuntimeError("Number of threads is undefined or has wrong dimension")
    if min(out) < 0:
        raise TypeError(f"thread counts must not be negative, got {out}")
    return out


class Library:
    """A compiled source; its kernels are attributes."""

    def __init__(self, text: str, host: compiler.Host | None = None) -> None:
        self._version, self._host = _settings.get().version, host
        self._text = compiler.embed(text, host)
        self._lines = self._text.split("\n")
        self._unit = compiler.check(self._text, self._version, host)
        self._kernels: dict[str, Kernel] = {}

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, self._entry(name))
        return self._kernels[name]

    def _entry(self, name: str) -> source.Entry:
        entry = next((e for e in self._unit.entries if e.host == name), None)
        if entry is None:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        return entry

    def function(self, name: str, constants: Mapping[int, Value]) -> Kernel:
        """A kernel with values of function constants by index; one that is not given is undefined."""
        unknown = sorted(set(constants) - set(self._unit.constants))
        if unknown:
            raise ValueError(f"{name}: the source has no function_constant({unknown[0]})")
        return Kernel(self, self._entry(name), constants)

    def __dir__(self) -> list[str]:
        return [e.host for e in self._unit.entries]


def compile_shader(source: str) -> Library:
    """A library of the kernels in Metal ``source``, that run on CPU tensors as ``torch.mps``'s run on MPS tensors.

    Raises SyntaxError for a source that Metal would refuse, UnsupportedError where the simulator cannot run.
    """
    return Library(source)


def compile_foreign(
    source: str, folders: Sequence[str] = (), macros: Mapping[str, str] = _NOTHING,
    kernels: Sequence[str] = (),
) -> Library:  # fmt: skip
    """A library of a source that another runtime than ``torch.mps`` compiles and launches.

    Its headers are looked for in ``folders``, ``macros`` are defined before it, and if ``kernels`` are named no others
    are made. Such a source may ask for function constants (``Library.function``), for threadgroup memory of the launch
    (``threadgroup=``), and leave numbers of buffers out (None among the arguments).
    """
    return Library(source, compiler.Host(tuple(map(str, folders)), tuple(macros.items()), tuple(kernels)))
