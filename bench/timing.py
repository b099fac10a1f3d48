"""How calls are timed.

Inputs are cold: enough sets of them that a set has left the second-level cache before its turn comes again, and
outputs are kept, so that they are not written into the cache over and over. ``graph`` replays a CUDA graph of one call
per set, so launches cost the host nothing; ``eager`` issues the same calls one by one behind a running queue. Both
report the median over repeats of the time of one call. Clocks are left alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_REPEATS, _WARM = 15, 3
_SECONDS = 0.25  # what one measurement may take
Calls = list[Callable[[], Any]]


def sets_for(nbytes: int, device: torch.device) -> int:
    """How many input sets of ``nbytes`` cycle past the cache, bounded by memory and by the length of a graph."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free = torch.cuda.mem_get_info(device)[0]
    return max(1, min(-(-3 * cache // max(nbytes, 1)), free // 3 // max(nbytes, 1), 400))


def graph(calls: Calls) -> float:
    """Microseconds a call, of a graph that runs each of ``calls`` once and at least 8 in all."""
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
    us = _median(captured.replay) / len(calls)
    del kept, captured
    return us


def eager(calls: Calls) -> float:
    """Microseconds a call when the host issues every one of them."""
    calls = calls * -(-8 // len(calls))

    def run() -> None:
        for call in calls:
            call()

    return _median(run) / len(calls)


def _median(run: Callable[[], Any]) -> float:
    """Microseconds of one ``run``, the median of repeats between device events."""
    for _ in range(_WARM):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    repeats = max(3, min(_REPEATS, int(_SECONDS / max(once, 1e-6))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) * 1e3


def limits() -> dict[str, float]:
    """The device's limits as measured here: TB/s of a copy, and bf16 TFLOP/s of an 8192^3 product."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    # Not as a graph: there a copy goes to the copy engines, which are slower than the multiprocessors.
    copy = 2 * source.nbytes / eager([functools.partial(target.copy_, source)]) / 1e6
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / graph([functools.partial(torch.mm, a, b)]) / 1e6
    del a, b
    torch.cuda.empty_cache()
    return {"copy": copy, "bf16": product}
