"""No sm90 kernel may touch memory that is not its own, whatever lengths, offsets and indices say.

    python tests/cuda/sanitize.py [OP ...]

Compiles what they need, then runs every row of the ops under ``compute-sanitizer`` (memcheck), a process for each op,
and prints the errors it counted; exits with 1 if there were any. Attention runs twice, the second time with the plans
of a GPU with few multiprocessors: most cases are small, and only there do they have persistent CTAs. The inputs are
those of the parity cases, with every integer tensor replaced by hostile values: below zero, past the end, and as large
as 32 bits allow. The results are not looked at. Each tensor is an allocation of its own, so that the tool sees a step
past any of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.console import Console

from torch_attnkit import parity
from torch_attnkit.core import config, dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Call, Kernel
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile, driver
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.warmup import fill

PROCESSES = 5  # processes
FEW = 2  # multiprocessors
HOSTILE = (-(2**31), -1, 0, 1, 7, 1 << 20, 2**31 - 1)


def hostile(value: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Half of the values as they were, the others replaced."""
    other = torch.tensor(HOSTILE)[torch.randint(len(HOSTILE), value.shape, generator=gen)].to(value.dtype)
    return torch.where(torch.rand(value.shape, generator=gen) < 0.5, value, other)


@contextlib.contextmanager
def planning(sms: int | None) -> Iterator[None]:
    """Plans as on a GPU with so many multiprocessors, if given, on which every length is enough to share."""
    kept = driver.sm_count, plan._SHARED_KEYS
    if sms is not None:
        driver.sm_count, plan._SHARED_KEYS = lambda device: sms, 0
    for plans in dispatch._PLANS.values():
        plans.clear()
    try:
        yield
    finally:
        driver.sm_count, plan._SHARED_KEYS = kept


def ways_of(name: str) -> list[int | None]:
    """How an op's calls are planned, one after another."""
    return [None, FEW] if name.startswith(("sdpa", "flash", "sparse")) else [None]


def calls_of(name: str) -> Iterator[tuple[Kernel, Call, tuple[Any, ...], dict[str, Any]]]:
    """The parity cases of an op on its rows for sm90, without features and with as many as go together."""
    op = OPS[name]
    for index, row in enumerate(op.kernels):
        if "sm90" not in row.archs:
            continue
        most = [(), *parity.all_features(op, tuple(row.features.split()))]
        for case in parity.cases(op, index, "sm90"):
            if case.dtype != row.dtypes.split()[0] or case.features not in most:
                continue
            args, kwargs = parity.arguments(case)
            if not row.refusal(call := parity.bound(op, args, kwargs)):
                yield row, call, args, kwargs


def kernels(names: list[str]) -> list[compile.Request]:
    """What these calls need compiled, but for those with one tensor for both caches."""
    found: dict[compile.Request, None] = {}
    for name in names:
        for sms in ways_of(name):
            with planning(sms):
                for row, call, _, _ in calls_of(name):
                    with compile.recording() as asked:
                        OPS[name].build(row, call, Target("sm90"))
                    found |= dict.fromkeys(asked)
    return list(found)


def run(name: str) -> int:
    """All calls of an op, in every way that it is planned; how many there were."""
    calls = 0
    for sms in ways_of(name):
        with planning(sms):
            calls += _run(name)
    return calls


def _run(name: str) -> int:
    calls, gen = 0, torch.Generator().manual_seed(0)
    for row, _, args, kwargs in calls_of(name):
        moved = [
            a if not isinstance(a, torch.Tensor) else (a if a.is_floating_point() else hostile(a, gen)).cuda()
            for a in args
        ]
        ways = [moved]
        if name.startswith("sdpa_decode") and moved[1].shape == moved[2].shape:
            ways.append([*moved[:2], moved[1], *moved[3:]])  # one tensor for both caches has kernels of its own
        elif name.startswith("sdpa_decode") and (one := OPS[name].module("cases").shared(row, moved)):
            ways.append(one)
        for each in ways:
            getattr(torch.ops.attnkit, name)(*each, **kwargs)
            torch.cuda.synchronize()
            calls += 1
    return calls


def sanitized(name: str) -> tuple[int, str]:
    """The errors that the tool counted in an op (-1: none of its summary came), and its last words."""
    # The compiler asks the driver for things that it may refuse; that is no error of a kernel.
    tool = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"]
    command = [*tool, sys.executable, __file__, "--here", name]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    text = done.stdout + done.stderr
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    calls = re.search(r"(\d+) calls", text)
    errors = int(summary[1]) if summary and calls else -1
    return errors, f"{calls[1] if calls else 'unknown'} calls" + ("" if errors == 0 else "\n" + text[-3000:])


def main(names: list[str]) -> int:
    names = names or [name for name, op in OPS.items() if any("sm90" in row.archs for row in op.kernels)]
    bad = fill(kernels(names), config.cache_dir() / "cuda", Console())
    with ThreadPoolExecutor(PROCESSES) as pool:
        for name, (errors, words) in zip(names, pool.map(sanitized, names), strict=True):
            print(f"{name}: {errors} errors, {words}", flush=True)
            bad += errors != 0
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(f"{run(sys.argv[2])} calls")
    else:
        sys.exit(main(sys.argv[1:]))
