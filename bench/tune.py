"""Find better entries for a family's table of tuned constants: ``python -m bench.tune FAMILY [--case C] [--rounds N]``.

A table (``TILES``, ``HEADS`` of a family) has an entry for each head size. For each bench case, every
entry that differs from the one that stands in one number is compiled, judged by the gate and timed in turns with it, on
cold inputs; the best one becomes the next to vary, as long as it gains. What is printed can be put into the table.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import timing
from bench.gate import gate
from torch_attnkit.core import config, dispatch
from torch_attnkit.core.op import Op
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.core.target import target_of
from torch_attnkit.cuda import compile
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16
from torch_attnkit.warmup import bench_inputs

_GAIN = 0.99  # of the time, from which on a candidate counts as faster
console = Console(width=200 if not sys.stdout.isatty() else None, soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Tuned:
    """Where a table stands, by which op's cases it is judged, and which of its entries a case uses."""

    op: str
    module: str
    table: str
    key: str
    first: tuple[Any, ...] = ()  # of a key, what a case's sizes do not say

    @property
    def arch(self) -> str:
        return self.module.split(".")[1]

    def key_of(self, dims: dict[str, int]) -> Any:
        return (*self.first, *(dims[axis] for axis in self.key.split()))

    def entries(self) -> dict[Any, Any]:
        found: dict[Any, Any] = getattr(importlib.import_module(f"torch_attnkit.kernels.{self.module}"), self.table)
        return found


FAMILIES = {
    "decode": Tuned("sdpa_decode", "decode.sm90.plan", "HEADS", "D Dv"),
    "prefill": Tuned("flash_attention", "prefill.sm90.tiles", "TILES", "D Dv", (BITS16,)),
    "cached": Tuned("sdpa_multi", "prefill.sm90.tiles", "TILES", "D Dv", (BITS16,)),
}


def neighbours(entry: Any, name: str = "") -> Iterator[Any]:
    """Entries that differ in one number: flags the other way, sizes one step up and down, thresholds at both ends."""
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        for field in dataclasses.fields(entry):
            for value in neighbours(getattr(entry, field.name), field.name):
                yield dataclasses.replace(entry, **{field.name: value})
    elif isinstance(entry, tuple):
        fields = getattr(entry, "_fields", [name] * len(entry))
        for i, (value, field) in enumerate(zip(entry, fields, strict=True)):
            for other in neighbours(value, field):
                changed = (*entry[:i], other, *entry[i + 1 :])
                yield type(entry)(*changed) if hasattr(entry, "_fields") else changed
    elif isinstance(entry, bool):
        yield not entry
    elif isinstance(entry, int) and entry <= 512:
        step = 64 if name == "tile_m" else 16 if entry >= 16 else 1
        yield from (n for n in (entry - step, entry + step) if n > 0)
    elif isinstance(entry, int):  # a threshold: nothing reaches it, or everything does
        yield from (0, 1 << 60)


def main(
    family: Annotated[str, typer.Argument(help=f"One of {', '.join(FAMILIES)}.")],
    case: Annotated[str, typer.Option(help="Only the bench cases whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often the best entry is varied again.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 8,
) -> None:
    """Time every entry near the one that a table has, for each bench case, on this machine's GPU."""
    if family not in FAMILIES:
        raise typer.BadParameter(f"no table of {family!r}; there are {', '.join(FAMILIES)}")
    if not torch.cuda.is_available():
        raise typer.BadParameter("a table is tuned on a CUDA device; simulated runs are not timed")
    tuned = FAMILIES[family]
    if target_of(torch.device("cuda")).arch != tuned.arch:
        raise typer.BadParameter(f"the table of {family!r} is of {tuned.arch}, this GPU is not")
    op = dispatch.OPS[tuned.op]
    for name, dims in op.module("cases").BENCH.items():
        key = tuned.key_of({"Dv": dims.get("D", 0)} | dims)
        if case in name and key in tuned.entries():
            with torch.device("cuda"):
                args, kwargs = bench_inputs(op, dims, DTYPES["bf16"], torch.Generator("cuda").manual_seed(0))
            found = Table("entry", "us", "of the table's", title=f"{family} {name}, {torch.cuda.get_device_name()}")
            for entry, us, ratio in search(Case.cold(op, args, kwargs), tuned.entries(), key, rounds, jobs):
                found.add_row(repr(entry), f"{us:.2f}", f"{ratio:.3f}")
            console.print(found)  # as soon as it is there: a search may be stopped
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Case:
    """A call by which entries are judged, with inputs to go through, and what times it.

    ``measure`` gives the microseconds of each of what ``prepare`` made of calls.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sets: list[tuple[Any, ...]]  # all arguments of a call, by position
    prepare: Callable[[timing.Calls], Any] = timing.graph
    measure: Callable[[list[Any]], list[float]] = timing.interleaved

    @classmethod
    def cold(cls, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
        """With as many sets of inputs as the table's own entry needs to find them cold."""
        values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
        return cls(op, args, kwargs, timing.cold(values, dispatch.make_plan(op, values).launch(*values)))

    def calls(self) -> timing.Calls:
        """The calls with the table as it stands, once they are right."""
        plan = dispatch.make_plan(self.op, self.sets[0])
        gate(self.op, self.args, self.kwargs, plan.launch(*self.sets[0]))
        return [lambda values=values: plan.launch(*values) for values in self.sets]

    def asks(self) -> tuple[tuple[compile.Request, ...], str]:
        """The kernels that the call asks for with the table as it stands, and its launches; none is made."""
        requests: list[compile.Request] = []
        launches: list[Any] = []

        def launcher(target: Any, device: Any, trace: compile.Trace, **signature: Any) -> Any:
            request = compile.Request.of(target.arch, trace, **signature)
            requests.append(request)
            return lambda *arguments: launches.append((request, _values(arguments)))

        with mock.patch.object(compile, "launcher", launcher):
            dispatch.make_plan(self.op, self.sets[0]).launch(*self.sets[0])
        return tuple(requests), repr(launches)


def _values(argument: Any) -> Any:
    """What a launch is told beside the contents of tensors."""
    if isinstance(argument, tuple | list):
        return [_values(a) for a in argument]
    return tuple(argument.shape) if isinstance(argument, torch.Tensor) else argument


def search(case: Case, entries: dict[Any, Any], key: Any, rounds: int, jobs: int) -> Iterator[tuple[Any, float, float]]:
    """(entry, microseconds, ratio to the table's) of the table's own entry and of the three best.

    ``entries[key]`` is varied, and stands as it was afterwards.
    """
    first = best = entries[key]
    times: dict[str, tuple[Any, float]] = {}
    try:
        for _ in range(rounds):
            todo = [best, *(e for e in neighbours(best) if repr(e) not in times)]
            right = {repr(entry): (entry, calls) for entry, calls in _right(case, entries, key, todo, jobs)}
            if repr(best) not in right:
                raise RuntimeError(f"{best}: is not right")
            # What graphs read and write belongs to the calls, which outlive them.
            runs = [case.prepare(calls) for _, calls in right.values()]
            measured = dict(zip(right, case.measure(runs), strict=True))
            # Of a later round, whose clocks may be others, the best entry before it is the measure.
            scale = times[repr(best)][1] / measured[repr(best)] if times else 1.0
            times |= {name: (right[name][0], us * scale) for name, us in measured.items()}
            faster, us = min(times.values(), key=lambda found: found[1])
            if us >= _GAIN * times[repr(best)][1]:
                break
            best = faster
    finally:
        entries[key] = first
    own = times.pop(repr(first))[1]
    for entry, us in [(first, own), *sorted(times.values(), key=lambda found: found[1])[:3]]:
        yield entry, us, us / own


def _right(
    case: Case, entries: dict[Any, Any], key: Any, todo: list[Any], jobs: int
) -> Iterator[tuple[Any, timing.Calls]]:
    """The entries that are right, and their calls; of the others it is said what they are."""
    asked: dict[Any, tuple[Any, tuple[compile.Request, ...]]] = {}
    for entry in todo:
        entries[key] = entry
        try:
            requests, launches = case.asks()
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, StopIteration, ValueError) as error:
            _log(entry, error)
        else:  # an entry that changes nothing for this call is left out
            asked.setdefault((requests, launches), (entry, requests))
    failed = _compile((r for _, requests in asked.values() for r in requests), jobs)
    for entry, requests in asked.values():
        entries[key] = entry
        try:
            for request in requests:
                if (failure := failed.get(request)) is not None:
                    raise failure
            console.print(f"{entry} ...")  # before it runs: a kernel that does not end has been named
            yield entry, case.calls()
        except (AssertionError, RuntimeError) as error:
            _log(entry, error)


def _log(entry: Any, error: BaseException) -> None:
    message = (str(error).splitlines() or [""])[0]
    console.print(f"{entry}: {type(error).__name__}: {message[-200:]}")  # what went wrong comes last


def _compile(wanted: Iterable[compile.Request], jobs: int) -> dict[compile.Request, BaseException]:
    """Compile side by side into the cache; what does not compile, and why."""
    folder = config.cache_dir() / "cuda"
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = {r: pool.submit(compile.compile_into, r, folder) for r in dict.fromkeys(wanted)}
        return {r: error for r, future in running.items() if (error := future.exception()) is not None}


if __name__ == "__main__":
    typer.run(main)
