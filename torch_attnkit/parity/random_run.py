"""``parity --random N``: N random signatures that rows accept, judged in processes; what fails is made simple."""

from __future__ import annotations

import collections
import functools
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from torch_attnkit.core import Target

from . import judge, properties
from .properties import Result
from .runners import SCHEDULES, Runner
from .signatures import Signature, Source, parse

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_AS_IT_IS: dict[str, Any] = dict(soft_wrap=True, markup=False, highlight=False)  # a line to be copied
_SIMPLIFIED = 12  # faults of which a failure is made simpler
_SHOWN = 4  # failures of each fault
_NEAR = 0.8  # of its tolerance: a right result with so large an error is worth a look


@dataclass(frozen=True)
class Plan:
    """What the command asks for: ``count`` signatures of ``seed``, that share ``kernels`` compiled configurations."""

    count: int
    seed: str
    kernels: int
    jobs: int


def run(console: Console, runner: Runner, ops: tuple[str, ...], plan: Plan) -> int:
    """Judge ``plan.count`` accepted signatures of ``ops`` on a runner, print what came of it, return the failures."""
    target, device = runner.target, runner.device
    limits = properties.HARDWARE if device != "cpu" else properties.SIMULATED
    schedules = SCHEDULES if target.simulated and target.arch != "metal" else 1
    source = Source(plan.seed, target.arch, ops, plan.kernels, limits, schedules)
    results = []
    with (
        Progress(*_COLUMNS, console=console) as progress,
        judge.workers(plan.jobs, functools.partial(_begin, runner)) as each,
    ):
        task = progress.add_task(f"{target}, seed {plan.seed}", total=plan.count)
        for result in accepted(source, device, plan.count, each):
            results.append(result)
            progress.advance(task, result.kind != "refused")
    console.print(_table(target, ops, results))
    _name_nearest(console, target, ops, results)
    wrong = [r for r in results if r.kind in ("wrong", "lost")]
    _explain(console, target, device, wrong)
    return len(wrong)


def _begin(runner: Runner) -> None:
    """For a process of its own: look as closely as its parent, to its end."""
    runner.watching().__enter__()


def accepted(source: Source, device: str, count: int, each: Callable[..., Iterator[Any]]) -> Iterator[Result]:
    """Results until ``count`` signatures were accepted, those that the table refuses among them.

    RuntimeError if it refuses more than it accepts: then it is the drawing that is wrong.
    """
    judged = functools.partial(properties.sampled, source, device)
    ran = begin = 0
    while ran < count:
        end = begin + count - ran
        done = begin
        try:
            for result in each(judged, range(begin, end)):
                done += 1
                ran += result.kind != "refused"
                yield result
        except BrokenProcessPool:
            raise RuntimeError(f"a process died in one of the signatures from {done} on; --jobs 1 says which") from None
        begin = end
        if begin - ran > count + 20:
            raise RuntimeError(f"{begin - ran} of {begin} signatures were refused by the table")


def _table(target: Target, ops: tuple[str, ...], results: list[Result]) -> Table:
    columns = (Column("op", overflow="fold"), "right", "wrong", "refused", "largest error\n/ tolerance")
    table = Table(*columns, title=f"random signatures, {target}")
    for op in ops:
        own = [r for r in results if r.signature.op == op]
        kinds = collections.Counter(r.kind for r in own)
        wrong = kinds["wrong"] + kinds["lost"]
        worst = max((r.error for r in own), default=0.0)
        table.add_row(op, str(kinds["right"]), str(wrong), str(kinds["refused"]), f"{worst:.2f}")
    return table


def _name_nearest(console: Console, target: Target, ops: tuple[str, ...], results: list[Result]) -> None:
    """The line that repeats each op's right result with the largest error, where that is near to its tolerance."""
    for op in ops:
        right = [r for r in results if r.signature.op == op and r.kind == "right"]
        worst = max(right, key=lambda r: r.error, default=None)
        if worst is not None and worst.error >= _NEAR:
            console.print(f"{worst.error:.3f} of the tolerance:", command(target, worst.signature), **_AS_IT_IS)


def _explain(console: Console, target: Target, device: str, wrong: list[Result]) -> None:
    """The failures by what is wrong, with the lines that repeat some of each, and the first of each made simpler."""
    faults: dict[str, list[Result]] = {}
    for result in wrong:
        faults.setdefault(result.fault, []).append(result)
    for number, alike in enumerate(faults.values()):
        console.print(f"[red]{len(alike)} x {escape(alike[0].message)}[/red]", soft_wrap=True)
        for result in alike[:_SHOWN]:
            console.print(command(target, result.signature), **_AS_IT_IS)
        if number < _SIMPLIFIED and alike[0].kind == "wrong":
            simple = properties.simplest(alike[0], target.arch, device)
            console.print(f"  simpler: {escape(simple.message)}", soft_wrap=True)
            console.print(f"  {command(target, simple.signature)}", **_AS_IT_IS)


def command(target: Target, chosen: Signature) -> str:
    """The line that repeats one signature."""
    where = f"--target {target.arch}{' --simulated' if target.simulated else ''}"
    return f"python -m torch_attnkit parity --op {chosen.op} {where} --repeat {shlex.quote(str(chosen))}"


def repeat(console: Console, runner: Runner, op: str, text: str) -> int:
    """Judge the one signature that ``text`` says; returns 1 unless it is accepted and right."""
    result = properties.judged(parse(op, text), runner.target.arch, runner.device)
    verdict = result.message or f"largest error {result.error:.2f} of the tolerance"
    console.print(f"{op} on {runner.target}: {result.kind}; {escape(verdict)}", soft_wrap=True)
    return int(result.kind != "right")
