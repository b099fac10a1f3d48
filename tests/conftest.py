"""Shared fixtures and limits. Every test starts from the same seed and leaves no simulated target behind.

A test's limit is in seconds of processor time, so that a busy machine fails nothing; what waits for ever without
computing is ended by pytest-timeout, after a time that no busy machine needs.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit.*

SECONDS = 120  # of processor time, for a test, and as much for its fixtures; ``@pytest.mark.seconds(n)`` gives one more
_left_out = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", action="store_true", help="run everything: every parity case, every kernel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--proof``, leave out what is marked so, and of a test with ``sample(n)`` all cases but every n-th."""
    if config.getoption("--proof"):
        return
    seen: collections.Counter[str] = collections.Counter()
    left = []
    for item in items:
        sample = item.get_closest_marker("sample")
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("proof") or (sample and seen[name] % sample.args[0]):
            left.append(item)
        seen[name] += 1
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left)
    config.stash[_left_out] = len(left)


def pytest_collection_finish() -> None:
    """Ten thousand tests and what they import stay to the end: to look through them again and again for what might go
    took a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the controller how much it left out; every worker has collected all tests."""
    gc.unfreeze()  # at its end a process looks for what was leaked
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_left_out, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_left_out] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left := config.stash.get(_left_out, 0):
        terminalreporter.write_line(
            f"left out: {left} tests that are marked proof or that a sample leaves, all parity cases but a sample of "
            "each op and architecture; make proof runs everything, python -m torch_attnkit parity the cases alone"
        )


@contextlib.contextmanager
def _limited(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("seconds")
    seconds = float(marker.args[0]) if marker else SECONDS

    def over(*_: Any) -> None:
        pytest.fail(f"took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two test processes share two cores
