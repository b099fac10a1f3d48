"""The bench on an Apple GPU: a known answer, parity, then our kernels and PyTorch's by turns in one process.

A time is the median over repeats of many calls between two events of the GPU's stream, divided by their number, so that
the cost of a launch is hidden behind the one before. Inputs are cold: sets of them cycle past the largest caches.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from bench import gate
from bench.peers import sdpa_mps
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Op
from torch_attnkit.core.target import Target
from torch_attnkit.mps import report
from torch_attnkit.parity import mutated
from torch_attnkit.warmup import bench_inputs

# What is timed of a model, by op and case: as it decodes for one user and for a few, and as it reads a prompt.
MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt-oss-20b": {
        "sdpa_decode": ("gptoss-1x8192",),
        "route_softmax": ("gptoss20b-1", "gptoss20b-512"),
        "fp4_moe": ("gptoss20b-1", "gptoss20b-4", "gptoss20b-512"),
    },
    "deepseek-v4-flash": {
        "route_hash": ("256-1",),
        "route_sqrt_softplus": ("256-1",),
        "fp4_moe": ("deepseek_v4-mxfp4-1", "deepseek_v4-mxfp4-8", "deepseek_v4-mxfp4-512"),
        "indexer_select": ("fp8-1-1x65536",),
        "sparse_fmha_with_swa": ("csa-64h-1", "csa-64h-8", "csa-64h-32", "hca-64h-1x8320", "fp8-64h-1"),
        "sparse_fmha_inverse_rope_fp4": ("csa-64h-1-nvfp4", "csa-64h-32-nvfp4"),
        "grouped_output_projection": ("none-8-1", "nvfp4-8-1", "nvfp4-8-128"),
        "kv_cache_write": ("fp8-1",),
        "kv_cache_gather": ("fp8-640",),
    },
}  # fmt: skip
Calls = list[Callable[[], Any]]
_CACHE = 96 << 20  # bytes; no Apple chip is known to have a larger cache before its memory
_PARTS = 6  # of a large case that the gate looks at, which is slow on a CPU
_REPEATS, _SECONDS, _MOST_SETS = 15, 0.25, 32


class Stream(Protocol):
    """What is timed on: ``torch.mps``, or a stand-in for it in the tests."""

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds that the device took for ``work``."""
        ...

    def memory(self) -> int:
        """Bytes that tensors may take."""
        ...


class Mps:
    """The stream of the Apple GPU of this machine."""

    def timed(self, work: Callable[[], None]) -> float:
        begin, end = (torch.mps.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.mps.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def memory(self) -> int:
        return int(torch.mps.recommended_max_memory())


def main(
    op: Op, dtype: torch.dtype, case: str, file: Path | None, console: Console, *, device: str = "mps",
    target: Target | None = None, stream: Stream | None = None,
) -> int:  # fmt: skip
    """Time one op, print a table, write the report; the number of cases that were wrong, 1 for a broken GPU."""
    each = [(op, [name for name in op.module("cases").BENCH if case in name])]
    return _timed(op.name, each, dtype, file, console, device, target, stream)


def model(
    name: str, dtype: torch.dtype, file: Path | None, console: Console, *, device: str = "mps",
    target: Target | None = None, stream: Stream | None = None,
) -> int:  # fmt: skip
    """The same of what ``MODELS`` names for a model, with one report."""
    each = [(OPS[op], list(cases)) for op, cases in MODELS[name].items()]
    return _timed(name, each, dtype, file, console, device, target, stream)


def _timed(
    name: str, each: list[tuple[Op, list[str]]], dtype: torch.dtype, file: Path | None, console: Console, device: str,
    target: Target | None, stream: Stream | None,
) -> int:  # fmt: skip
    found = report.begin(target or Target("metal"), device, "bench")
    why = report.trusted(found)
    if why:
        console.print(why, style="red", markup=False)
    else:
        found["bench"] = []
        for op, names in each:
            found["bench"] += (measured := list(lines(op, dtype, names, device, stream or Mps())))
            console.print(table(op.name, measured))
    console.print(report.write(found, file or report.default_file(f"bench-{name}")), soft_wrap=True)
    return 1 if why else sum("error" in line for line in found["bench"])


def lines(op: Op, dtype: torch.dtype, names: list[str], device: str, stream: Stream) -> Iterator[dict[str, Any]]:
    """One record for each case; without a time it says why: ``error`` or ``skipped``."""
    for name in names:
        line = _line(op, op.module("cases").BENCH[name], dtype, device, stream)
        yield {"op": op.name, "case": name, "dtype": str(dtype).removeprefix("torch.")} | line


def _line(op: Op, dims: dict[str, int], dtype: torch.dtype, device: str, stream: Stream) -> dict[str, Any]:
    cases, call = op.module("cases"), getattr(torch.ops.attnkit, op.name)
    nbytes, flops = cases.bytes(dims, dtype), cases.flops(dims)
    if 4 * nbytes > stream.memory():  # inputs on both sides of the gate, and two sets to time
        return {"skipped": f"{nbytes / 1e9:.1f} GB of tensors in {stream.memory() / 1e9:.1f} GB of memory"}
    try:
        given, kwargs = bench_inputs(op, dims, dtype, torch.Generator().manual_seed(0))
        args = tuple(_to(a, device) for a in given)
        got = (*mutated(op, args), *gate.tensors_of(call(*args, **kwargs)))
        outs = tuple(t.cpu() for t in got)
        error = gate.gate(op, given, kwargs, outs, most=_PARTS)  # on the CPU: Apple GPUs have no float64
    except (AssertionError, NotImplementedError, RuntimeError, ValueError, TypeError) as failure:
        return {"error": f"{type(failure).__name__}: {failure}"}
    sets = [args] + [tuple(_to(a, device) for a in given) for _ in range(_sets(nbytes, stream) - 1)]
    calls: dict[str, Calls] = {"ours": [functools.partial(call, *a, **kwargs) for a in sets]}
    name, theirs = _peer(op, sets, kwargs)
    line: dict[str, Any] = {"bytes": nbytes, "flops": flops, "error_of_tolerance": error, "input_sets": len(sets)}
    if theirs is not None:
        first = gate.tensors_of(theirs[0]())[0].cpu().float()
        off = float((first - outs[0].reshape(first.shape).float()).norm() / first.norm())
        line["peer_difference"] = off  # a kernel may be faster because it computes something else
        calls[name] = theirs
    line["us"] = {who: us for who, us in _interleaved(calls, stream).items()}
    line["gb_s"] = nbytes / line["us"]["ours"] / 1e3
    line["tflop_s"] = flops / line["us"]["ours"] / 1e6
    return line


def _sets(nbytes: int, stream: Stream) -> int:
    return max(1, min(-(-2 * _CACHE // max(nbytes, 1)), stream.memory() // 4 // max(nbytes, 1), _MOST_SETS))


def _peer(op: Op, sets: list[Any], kwargs: dict[str, Any]) -> tuple[str, Calls | None]:
    """PyTorch's attention kernels, eager PyTorch for what is a few lines of it, and None for all else."""
    if op.name in ("gated_rmsnorm", "merge_partials"):
        reference = op.module("reference").reference
        return "PyTorch eager", [functools.partial(reference, *a, **kwargs) for a in sets]
    calls = [c for a in sets if (c := sdpa_mps.adapt(op.name, a, kwargs)) is not None]
    return "PyTorch SDPA", calls or None


def _interleaved(calls: dict[str, Calls], stream: Stream) -> dict[str, float]:
    """Microseconds a call of each side: medians of repeats that take turns, so that both meet the same clocks."""
    rounds = {}
    for who, each in calls.items():
        single_s = max(stream.timed(functools.partial(_all, each)), 1e-6)  # also the warm-up
        rounds[who] = max(1, int(_SECONDS / _REPEATS / single_s))
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(_REPEATS):
        for who, each in calls.items():
            seconds = stream.timed(functools.partial(_all, each * rounds[who]))
            times[who].append(seconds / rounds[who] / len(each))
    return {who: statistics.median(found) * 1e6 for who, found in times.items()}


def _all(calls: Calls) -> None:
    for call in calls:
        call()


def _to(value: Any, device: str) -> Any:
    return value.to(device).clone() if isinstance(value, torch.Tensor) else value


def table(op: str, lines: list[dict[str, Any]]) -> Table:
    out = Table("case", "us", "GB/s", "TFLOP/s", "error / tol", "PyTorch's us", "PyTorch's / ours", title=op)
    for line in lines:
        if "us" not in line:
            out.add_row(line["case"], line.get("error") or line["skipped"], *["-"] * 5, style="red" * ("error" in line))
            continue
        us, *rest = line["us"].values()
        cells = (f"{us:.1f}", f"{line['gb_s']:.1f}", f"{line['tflop_s']:.2f}", f"{line['error_of_tolerance']:.2f}")
        out.add_row(line["case"], *cells, *((f"{rest[0]:.1f}", f"{rest[0] / us:.2f}") if rest else ("-", "-")))
    return out
