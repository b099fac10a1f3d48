"""What the GPU and the host do in a step of a served model, as torch's profiler counts it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import torch

_STEPS = 10
_BEFORE = 4  # steps in which all requests decode, before the profile begins
KERNELS = 25
_WIDTH = 72
# Names of the CUDA runtime's and driver's calls.
_LAUNCHES = re.compile(r"cudaLaunchKernel|cudaLaunchCooperativeKernel|cuLaunchKernel|cudaLaunchKernelEx")
_GRAPHS = "cudaGraphLaunch"


def parts(engine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Decode steps of all requests, of one, and the step that reads as many tokens as a step holds."""
    asked = engine.run.load
    with profiler(engine):  # the first one starts the GPU's counters
        pass
    yield "decode", decode(engine, asked.requests)
    yield "single", decode(engine, 1)
    yield "prefill", prefill(engine)


def decode(engine: Any, requests: int) -> dict[str, Any]:
    from .served import Steps

    asked = engine.run.load
    # All of the requests decode while the profile is taken, however late the last prompt was read.
    new = 2 * requests * asked.prompt // asked.chunk + _BEFORE + _STEPS + 8
    names = engine.add(engine.prompts(requests, asked.prompt), new)
    steps, concurrent = Steps(time.perf_counter()), 0
    going = engine.steps(steps)
    while concurrent < _BEFORE:
        concurrent += next(going) == requests
    with profiler(engine) as found:
        began = time.perf_counter()
        for _ in range(_STEPS):
            next(going)
        ended = time.perf_counter()
    going.close()
    engine.abort(names)
    return summary(found, _STEPS, (ended - began) / _STEPS)


def prefill(engine: Any) -> dict[str, Any]:
    from .served import Steps

    asked = engine.run.load
    prompts = engine.prompts(max(1, asked.chunk // asked.prefill), min(asked.prefill, asked.chunk))
    engine.add(prompts, 1)
    with profiler(engine) as found:
        steps = Steps(time.perf_counter())
        for _ in engine.steps(steps):
            pass
    return summary(found, 1, steps.seconds)


def profiler(engine: Any) -> Any:
    """torch's profiler of this process, with nothing of earlier steps in it and all of its own."""
    from .served import synchronize

    class Whole(torch.profiler.profile):
        def __enter__(self) -> Any:
            synchronize(engine.run)
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            synchronize(engine.run)
            super().__exit__(*error)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if engine.run.device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return Whole(activities=activities)


def summary(found: Any, steps: int, wall: float) -> dict[str, Any]:
    """A step: ms on the clock and of the GPU's work, launches by the host, kernels that take most of the time."""
    averages = found.key_averages()
    kernels = [
        e
        for e in averages
        if e.device_type == torch.autograd.DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]
    host = [e for e in averages if e.device_type == torch.autograd.DeviceType.CPU]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return {
        "steps": steps,
        "wall_ms": wall * 1e3,
        "gpu_ms": sum(e.self_device_time_total for e in kernels) / steps / 1e3,
        "kernels": sum(e.count for e in kernels) / steps,
        "launches": sum(e.count for e in host if _LAUNCHES.match(e.key)) / steps,
        "graph_launches": sum(e.count for e in host if e.key == _GRAPHS) / steps,
        "top": [
            {"name": short(e.key), "calls": e.count / steps, "us": e.self_device_time_total / steps}
            for e in kernels[:KERNELS]
        ],
    }


def short(name: str) -> str:
    """A kernel's name without its result, its arguments and most of its namespaces."""
    name = re.sub(r"\(anonymous namespace\)::", "", name.removeprefix("void "))
    name = re.sub(r"\b(?:at::native|at|cutlass|cute|flash|vllm)::", "", name)
    name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= _WIDTH else name[: _WIDTH - 3] + "..."
