"""Find better entries for a family's table of tuned constants: ``python -m bench.tune FAMILY [--case C] [--rounds N]``.

A table (``TILES``, ``HEADS``, ``_LANES`` in a family's ``plan.py``) has an entry for each head size or length. For each
bench case, every entry that differs from the one that stands in one number is compiled, judged by the gate and timed
in turns with it; the best one becomes the next to vary, as long as it gains. What is printed can be put into the table.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any

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
from torch_attnkit.warmup import bench_inputs

_GAIN = 0.99  # of the time, from which on a candidate counts as faster
console = Console()


@dataclass(frozen=True)
class Tuned:
    """Where a table stands, by which op's cases it is judged, and which of its entries a case uses."""

    op: str
    module: str
    table: str
    key: str

    def key_of(self, dims: dict[str, int]) -> Any:
        return tuple(dims[axis] for axis in self.key.split())

    def entries(self) -> dict[Any, Any]:
        found: dict[Any, Any] = getattr(importlib.import_module(f"torch_attnkit.kernels.{self.module}"), self.table)
        return found


FAMILIES = {
    "decode": Tuned("sdpa_decode", "decode.sm90.plan", "HEADS", "D Dv"),
    "prefill": Tuned("flash_attention", "prefill.sm90.plan", "TILES", "D Dv"),
    "cached": Tuned("sdpa_multi", "prefill.sm90.multi_plan", "TILES", "D Dv"),
}


def neighbours(entry: Any, name: str = "") -> Iterator[Any]:
    """Entries that differ in one number: flags the other way, sizes one step up and down, options left out."""
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
    op = dispatch.OPS[tuned.op]
    found = Table("case", "entry", "us", "of the table's", title=f"{family}, {torch.cuda.get_device_name()}")
    for name, dims in op.module("cases").BENCH.items():
        key = tuned.key_of({"Dv": dims.get("D", 0)} | dims)
        if case in name and key in tuned.entries():
            for entry, us, ratio in _of_case(tuned, op, dims, key, rounds, jobs):
                found.add_row(name, repr(entry), f"{us:.2f}", f"{ratio:.3f}")
            torch.cuda.empty_cache()
    console.print(found)


def _of_case(
    tuned: Tuned, op: Op, dims: dict[str, int], key: Any, rounds: int, jobs: int
) -> Iterator[tuple[Any, float, float]]:
    """(entry, microseconds, ratio to the table's) of the table's own entry and of the three best, for one case."""
    with torch.device("cuda"):
        args, kwargs = bench_inputs(op, dims, DTYPES["bf16"], torch.Generator("cuda").manual_seed(0))
    values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
    entries, first = tuned.entries(), tuned.entries()[key]
    times: dict[str, tuple[Any, float]] = {}
    best = first
    try:
        for _ in range(rounds):
            todo = _distinct(op, values, entries, key, [best, *(e for e in neighbours(best) if repr(e) not in times)])
            _compile(todo, jobs)
            runs, kept = [], []
            for entry in todo.values():
                entries[key] = entry
                try:
                    plan = dispatch.make_plan(op, values)
                    gate(op, args, kwargs, plan.launch(*values))
                    runs.append(timing.graph([lambda launch=plan.launch: launch(*values)]))
                    kept.append(entry)
                except (AssertionError, RuntimeError) as error:
                    words = str(error).splitlines()[0][:120]
                    console.print(f"{entry}: {type(error).__name__}: {words}", soft_wrap=True)
            measured = timing.interleaved(runs)
            # Of a later round, whose clocks may be others, the best entry before it is the measure.
            scale = times[repr(best)][1] / measured[0] if repr(best) in times else 1.0
            times |= {repr(e): (e, us * scale) for e, us in zip(kept, measured, strict=True)}
            faster = min(times.values(), key=lambda found: found[1])
            if faster[1] >= _GAIN * times[repr(best)][1]:
                break
            best = faster[0]
    finally:
        entries[key] = first
    own = times[repr(first)][1]
    others = sorted((t for name, t in times.items() if name != repr(first)), key=lambda found: found[1])
    for entry, us in [(first, own), *others[:3]]:
        yield entry, us, us / own


def _distinct(
    op: Op, values: tuple[Any, ...], entries: dict[Any, Any], key: Any, todo: list[Any]
) -> dict[tuple[compile.Request, ...], Any]:
    """The entries by what they ask to be compiled for the call; what a plan cannot use, or repeats, is left out."""
    found: dict[tuple[compile.Request, ...], Any] = {}
    target = target_of(torch.device("cuda"))
    for entry in todo:
        entries[key] = entry
        call = op.bind(values)
        row = dispatch.resolve(op, call, target)
        assert row is not None
        with compile.recording() as asked:
            try:
                op.module(row.file).build(call, target)
            except (KeyError, StopIteration, ValueError, ZeroDivisionError):
                continue
        found.setdefault(tuple(asked), entry)
    return found


def _compile(todo: dict[tuple[compile.Request, ...], Any], jobs: int) -> None:
    """Compile side by side; what fails says so when it is planned."""
    folder = config.cache_dir() / "cuda"
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        wanted = dict.fromkeys(request for requests in todo for request in requests)
        for future in [pool.submit(compile.compile_into, request, folder) for request in wanted]:
            future.exception()


if __name__ == "__main__":
    typer.run(main)
