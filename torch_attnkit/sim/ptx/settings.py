"""How launches run inside a block, and what was counted: context managers over plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from .runtime import machine


@dataclass(frozen=True)
class Settings:
    """``check`` watches for races, uninitialised memory and misused barriers (slower, on one thread).

    ``seed`` 0 completes asynchronous operations at once; any other number is a schedule of its own, in which they and
    the warps run in an order that is legal and hostile. ``poison`` fills shared and tensor memory with NaN. ``threads``
    0 takes every core; ``limit`` is the number of warp instructions after which a launch counts as endless (0: none);
    ``processors`` the number of multiprocessors (0: an H200's or a B200's). ``removed`` holds the indices of statements
    that are skipped, for studies of what a check would miss. ``waive`` names kinds of findings (docs/ptx_simulator.md)
    that a checked run counts in its notes instead of raising; ``strict`` names kinds of notes that it raises, and what
    it looks for only when asked.
    """

    check: bool = False
    seed: int = 0
    poison: bool = True
    threads: int = 0
    limit: int = 0
    processors: int = 0
    removed: tuple[int, ...] = ()
    waive: Sequence[str] = ()
    strict: Sequence[str] = ()

    def __post_init__(self) -> None:
        for option, given in (("waive", self.waive), ("strict", self.strict)):
            if isinstance(given, str):
                raise TypeError(f"settings: {option} is {given!r}, accepted: a sequence of names")
            for name in given:
                names = machine().finding_names()
                if name not in names:
                    raise ValueError(f"settings: {option} has {name!r}, accepted: {', '.join(names)}")


@dataclass(frozen=True)
class Launch:
    """One kernel launch that ran to its end: its shape, and what the machine counted.

    ``notes`` are what a check saw and does not call wrong, such as several writers of the same value, and first of all
    what was waived for this launch.
    """

    kernel: str
    target: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    counters: dict[str, Any]
    notes: tuple[str, ...] = ()


_NAMES = tuple(f.name for f in fields(Settings))
_settings: ContextVar[Settings] = ContextVar("attnkit_ptx_settings", default=Settings())  # noqa: B039 (immutable)
_launches: ContextVar[list[Launch] | None] = ContextVar("attnkit_ptx_launches", default=None)
current = _settings.get


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Run launches with other settings inside this block; ``changes`` are fields of Settings."""
    unknown = ", ".join(sorted(changes.keys() - set(_NAMES)))
    if unknown:
        raise ValueError(f"settings: there is no {unknown}, accepted: {', '.join(_NAMES)}")
    token = _settings.set(replace(_settings.get(), **changes))
    try:
        yield _settings.get()
    finally:
        _settings.reset(token)


@contextmanager
def counting() -> Iterator[list[Launch]]:
    """A Launch for every launch inside this block is appended to the list."""
    launches: list[Launch] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def note(launch: Launch) -> None:
    """Give a launch to the innermost ``counting`` block, if there is one."""
    launches = _launches.get()
    if launches is not None:
        launches.append(launch)
