"""How calls are timed.

Inputs are cold: enough sets of them that a set has left the second-level cache before its turn comes again, and outputs
are kept, so that they are not written into the cache over and over. ``graph`` makes a CUDA graph of one call per set,
so launches cost the host nothing; ``interleaved`` gives all contenders their turns, each after each of the others, so
that clocks, power and temperature are the same for all; ``eager`` issues calls one by one behind a running queue;
``host`` is what issuing a call costs the host. All report the median over repeats of the time of one call, but
``host`` the least: the host has others to serve, and seconds in which everything takes twice as long. Clocks are left
alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_REPEATS, _WARM = 15, 3
_ROUNDS, _ISSUED = 40, 64  # of ``host``
_SECONDS = 0.25  # what one measurement may take
_HOST_SECONDS = 2.0  # after which ``host`` ends: calls of milliseconds fill the queue, and rounds wait for it
Calls = list[Callable[[], Any]]


def sets_for(nbytes: int, device: torch.device) -> int:
    """How many input sets of ``nbytes`` cycle past the cache, bounded by memory and by the length of a graph."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free = torch.cuda.mem_get_info(device)[0]
    return max(1, min(-(-3 * cache // max(nbytes, 1)), free // 3 // max(nbytes, 1), 400))


def cold(args: tuple[Any, ...], got: Any) -> list[tuple[Any, ...]]:
    """``args``, and as many copies as calls that give ``got`` need to find theirs cold."""
    tensors = [t for t in (*args, *(got if isinstance(got, tuple) else (got,))) if isinstance(t, torch.Tensor)]
    copies = sets_for(sum(t.nbytes for t in tensors), tensors[0].device)
    return [args] + [clones(args) for _ in range(copies - 1)]


def clones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the tensors; one that is given twice, such as a cache that is keys and values, stays one."""
    made: dict[int, torch.Tensor] = {}
    return tuple(made.setdefault(id(a), a.clone()) if isinstance(a, torch.Tensor) else a for a in args)


@dataclass(frozen=True)
class Run:
    """Something to time: ``go`` issues ``calls`` calls; ``kept`` holds what a graph reads and writes."""

    go: Callable[[], Any]
    calls: int
    kept: Any = None


def graph(calls: Calls) -> Run:
    """A CUDA graph that runs each of ``calls`` once, and at least 8 in all."""
    calls = calls * -(-8 // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        kept = [call() for call in calls]
    return Run(captured.replay, len(calls), (captured, kept, calls))


def plain(calls: Calls) -> Run:
    """The same calls, issued by the host one by one."""
    calls = calls * -(-8 // len(calls))

    def go() -> None:
        for call in calls:
            call()

    return Run(go, len(calls))


def orders(count: int) -> list[list[int]]:
    """Turns of ``count`` contenders in which each follows each of the others equally often (Williams, 1949).

    Who comes after a contender that draws little power runs at higher clocks: on an H200 15 % for milliseconds.
    """
    first = [(i + 1) // 2 if i % 2 else -i // 2 % count for i in range(count)]
    rows = [[(x + shift) % count for x in first] for shift in range(count)]
    return rows + [row[::-1] for row in rows] if count % 2 else rows


def interleaved(runs: list[Run]) -> list[float]:
    """Microseconds a call of each run: the median over rounds in which every run has its turn."""
    for run in runs:
        for _ in range(_WARM):
            run.go()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for run in runs:
        run.go()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / len(runs)
    orderings = orders(len(runs))
    rounds = max(5, min(_REPEATS, int(_SECONDS / max(seconds, 1e-6))))
    orderings *= -(-rounds // len(orderings))
    marks = [[(_event(), _event()) for _ in runs] for _ in orderings]
    for events, order in zip(marks, orderings, strict=True):
        for i in order:
            before, after = events[i]
            before.record()
            runs[i].go()
            after.record()
    torch.cuda.synchronize()
    times = ([before.elapsed_time(after) for before, after in column] for column in zip(*marks, strict=True))
    return [statistics.median(t) * 1e3 / run.calls for t, run in zip(times, runs, strict=True)]


def eager(calls: Calls) -> float:
    """Microseconds a call when the host issues every one of them."""
    return interleaved([plain(calls)])[0]


def host(contenders: list[Calls]) -> list[float]:
    """Microseconds of the host's time to issue one call of each, the queue never full; the contenders take turns."""
    best = [float("inf")] * len(contenders)
    began = time.perf_counter()
    for repetition in range(_ROUNDS):
        if repetition > 1 and time.perf_counter() - began > _HOST_SECONDS:
            break
        for i, (call, *_) in enumerate(contenders):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_ISSUED):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / _ISSUED * 1e6)
    torch.cuda.synchronize()
    return best


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def limits() -> dict[str, float]:
    """The device's limits as measured here: TB/s of a copy, and bf16 TFLOP/s of an 8192^3 product."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    # Not as a graph: there a copy goes to the copy engines, which are slower than the multiprocessors.
    copy = 2 * source.nbytes / eager([functools.partial(target.copy_, source)]) / 1e6
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / interleaved([graph([functools.partial(torch.mm, a, b)])])[0] / 1e6
    del a, b
    torch.cuda.empty_cache()
    return {"copy": copy, "bf16": product}
