"""``python -m torch_attnkit parity``: run the cases of the table's rows here, and keep what they showed."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import torch_attnkit
from torch_attnkit.core import Target
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support
from torch_attnkit.core.target import SIMULATED

from . import evidence, random_run
from .case import Case, cases
from .evidence import Outcome, Row
from .guard import LAYOUTS
from .judge import outcome, workers
from .runners import Runner, here, simulators

console = Console()
KNOWN = ("cpu", *SIMULATED)
ERROR = "largest error\n/ tolerance"  # of a table that fits 80 columns, whatever the names of its rows
SHOWN = 5  # failures of a row that are printed
MINUTES = 8.0  # that cases may take on a Mac, so that the report is there within ten
MOST = 4000  # cases of a sample at most, however many rows the table gets
MOST_STALE = 40  # cases of all stale rows of a runner, where they are looked at and not recorded
Run = tuple[Case, str, str, int]  # what ``outcome`` takes besides the runner


def parity(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", "--target", help=f"Only the rows of one of {', '.join(KNOWN)}.")
    ] = None,
    record: Annotated[
        bool | None, typer.Option(help="Keep the result in torch_attnkit/evidence/; default: with --stale.")
    ] = None,
    stale: Annotated[
        bool | None,
        typer.Option(
            "--stale/--resign",
            help="Only rows without evidence for this code. Or: compile, and keep evidence of what runs as it did.",
        ),
    ] = None,
    sample: Annotated[float, typer.Option(help="Run this share of the cases of all other rows.")] = 1.0,
    random: Annotated[int, typer.Option(help="Instead: this many random signatures that rows accept.", min=0)] = 0,
    kernels: Annotated[int, typer.Option(help="Of random signatures: samples of what is compiled.", min=1)] = 96,
    repeat: Annotated[str | None, typer.Option(help="One random signature, as a run prints it.")] = None,
    seed: Annotated[str, typer.Option(help="Of the sample, or of the random signatures.")] = "0",
    simulated: Annotated[bool, typer.Option("--simulated", help="In simulators alone, hardware or not.")] = False,
    report: Annotated[Path | None, typer.Option(help="On a Mac: the file for the report that can be sent in.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; a Mac's GPU has one.", min=1)] = 1,
) -> None:
    """Run the parity cases of every row that this machine can run, on its hardware and in the simulators it has."""
    check_names(op, arch)
    if not 0 < sample <= 1:
        raise typer.BadParameter(f"sample is {sample}, accepted: a share between 0 and 1")
    wanted = KNOWN if arch is None else (arch,)
    if stale is False:
        raise typer.Exit(_resign(wanted, op, jobs))
    runners = [p for p in here(wanted) if p.target.simulated or not simulated]
    if random or repeat is not None:
        raise typer.Exit(_random(runners, op, random_run.Plan(random, seed, kernels, jobs), repeat))
    failures = 0
    for runner in runners:
        rows = [r for r in _rows(runner, stale=bool(stale), sample=sample) if op in (None, r[0].name)]
        if runner.device == "mps":
            failures += _on_mac(runner, rows, report)
        else:
            kept = bool(stale) if record is None else record
            most = MOST_STALE if stale and not kept else MOST
            found = run_rows(runner, rows, jobs=jobs, share=sample, seed=seed, record=kept, most=most)
            failures += sum(o.failed for o, _ in found)
    for name, missing in simulators().items():
        if missing and name in wanted and not any(runner.target.arch == name for runner in runners):
            console.print(f"{name}: no hardware here, and {missing}", soft_wrap=True)
    raise typer.Exit(1 if failures else 0)


def _resign(archs: tuple[str, ...], op: str | None, jobs: int) -> int:
    """Sign the evidence of all devices anew that runs as it did. 1 if some does not."""
    table = Table("evidence of", "row", "is")
    other = 0
    for file, kept in zip(evidence.files(), evidence.load(), strict=True):
        if kept["arch"] in archs:
            with workers(jobs) as each:
                found = evidence.resign(file, [op] if op else list(OPS), each)
            for row in found:
                table.add_row(file.stem, row.name, str(row))
            other += sum(not row.same for row in found)
    console.print(table)
    return 1 if other else 0


def _random(runners: list[Runner], op: str | None, plan: random_run.Plan, repeat: str | None) -> int:
    """Random signatures, or the one given, on hardware where it is and else simulated. 1 if one of them failed."""
    hardware = {runner.target.arch for runner in runners if not runner.target.simulated}
    chosen = [p for p in runners if not (p.target.simulated and p.target.arch in hardware)]
    if repeat is not None and (op is None or len(chosen) != 1):
        raise typer.BadParameter("--repeat needs --op and --target, as a run prints them")
    failed = ran = 0
    for runner in chosen:
        ops = tuple(dict.fromkeys(o.name for o, *_ in support(runner.target.arch) if op in (None, o.name)))
        if not ops:
            console.print(f"{runner}: there is no kernel of {op or 'any op'}")
            continue
        with runner.watching():
            try:
                failed += (
                    random_run.run(console, runner, ops, plan)
                    if repeat is None
                    else random_run.repeat(console, runner, ops[0], repeat)
                )
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        ran += 1
    return 1 if failed or not ran else 0


def check_names(op: str | None, arch: str | None) -> None:
    """Words for an op or an arch that does not exist; the command then ends with 2."""
    if op is not None and op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are {', '.join(OPS)}")
    if arch is not None and arch not in KNOWN:
        raise typer.BadParameter(f"arch is {arch!r}, accepted: {', '.join(KNOWN)}")


def _rows(runner: Runner, *, stale: bool, sample: float) -> list[Row]:
    """All rows of a runner; the stale ones alone; or of a sample those that are not, since a stale row runs whole."""
    rows = support(runner.target.arch)
    if not stale and sample == 1:
        return rows
    old = {(op.name, index) for op, index, _, _ in evidence.stale(runner.target, runner.evidence)}
    return [r for r in rows if ((r[0].name, r[1]) in old) == stale]


def _sampled(runs: list[Run], *, share: float, seed: str) -> list[Run]:
    """The same share of the runs for the same seed, spread evenly over their order."""
    rng = Random(f"{seed} {runs[0][0].id}" if runs else seed)
    return [r for r in runs if rng.random() < share]


def runs_of(runner: Runner, row: Row) -> list[Run]:
    """Every case of a row in both layouts; in the PTX simulator the schedules take turns."""
    op, index, _, arch = row
    todo = cases(op, index, arch, covering=runner.target.simulated)
    return [(c, runner.device, layout, n) for n, (c, layout) in enumerate((c, lay) for c in todo for lay in LAYOUTS)]


def run_rows(
    runner: Runner,
    rows: list[Row],
    *,
    jobs: int = 1,
    share: float = 1.0,
    seed: str = "",
    record: bool = False,
    most: int = MOST,
) -> list[tuple[Outcome, dict[str, Any]]]:
    """Run the cases of rows, or a share of them, and print a table.

    Returns how each row went, with its largest error and what failed. With ``record`` a row is kept as soon as it is
    done, so that a run which is cut off has not been for nothing. Of a share there are at most ``most`` cases.
    """
    if not rows:
        console.print(f"{runner}: nothing to run")
        return []
    if record:
        evidence.require(runner.target)
    for op, index, _, _ in rows:  # of the code that runs: an edit meanwhile is not what was seen
        evidence.sources_of(op.name, index, runner.target)
    todo = [runs_of(runner, row) for row in rows]
    whole = sum(map(len, todo))
    if share < 1 or (whole > most and most < MOST):
        share = min(share, most / max(1, whole))
        todo = [_sampled(runs, share=share, seed=seed) for runs in todo]
        console.print(f"{runner}: {sum(map(len, todo))} of {whole} cases")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    flat = [run for runs in todo for run in runs]
    found: list[tuple[Outcome, dict[str, Any]]] = []
    with Progress(*columns, console=console) as progress, workers(jobs) as each:
        task = progress.add_task(str(runner), total=len(flat))
        judge = functools.partial(outcome, runner)
        results: Iterator[float | str | None] = iter(each(judge, *zip(*flat, strict=True)) if flat else ())
        for row, runs in zip(rows, todo, strict=True):
            row_outcomes: list[float | str | None] = []
            for _ in runs:
                row_outcomes.append(next(results))
                progress.advance(task)
            found.append(_outcome(row, row_outcomes))
            if record:
                keep(runner, [found[-1][0]], each)
    console.print(_table(runner, found))
    if record:
        console.print("recorded; run: python -m torch_attnkit support --write SUPPORT.md", soft_wrap=True)
    return found


def _table(runner: Runner, found: list[tuple[Outcome, dict[str, Any]]]) -> Table:
    """A line for each row; what failed is printed before."""
    table = Table(Column("row", overflow="fold"), "cases", "refused", "failed", ERROR, title=str(runner))
    for one, more in found:
        for message in more["messages"][:SHOWN]:
            console.print(f"[red]{escape(message)}[/red]", soft_wrap=True)
        name, ran = f"{one.row[0].name}/{one.row[2].on}", one.passed + one.refused + one.failed
        table.add_row(name, str(ran), str(one.refused), str(one.failed), f"{more['error_of_tolerance']:.2f}")
    return table


def keep(runner: Runner, outcomes: list[Outcome], each: evidence.Map = map) -> None:
    """Record outcomes as evidence, with what they were seen on."""
    run: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": _versions(runner),
    }
    if runner.checked:
        run["also checked"] = runner.checked
    evidence.record(runner.target, runner.evidence, run, outcomes, each)


def _versions(runner: Runner) -> dict[str, str]:
    found = {"torch_attnkit": torch_attnkit.__version__, "torch": torch.__version__.split("+")[0]}
    if runner.target.arch.startswith("sm"):
        from torch_attnkit.cuda import compile

        found["nvidia-cutlass-dsl"] = compile.version("nvidia-cutlass-dsl")
    if runner.device == "cuda":
        from torch_attnkit.cuda import driver

        found |= {"driver": driver.driver_version(), "cuda": torch.version.cuda or "unknown"}
    return found


def covering_first(runner: Runner, row: Row) -> list[Run]:
    """Every case of a row in both layouts: first those in which every two facts meet that can, then the others."""
    op, index, _, arch = row
    first = cases(op, index, arch, covering=True)
    others = list(dict.fromkeys(cases(op, index, arch)).keys() - set(first))
    others.sort(key=lambda case: case.id)
    Random("report").shuffle(others)
    return [(c, runner.device, layout, 0) for c in first + others for layout in LAYOUTS]


def run_for(runner: Runner, rows: list[Row], minutes: float) -> list[tuple[Outcome, dict[str, Any]]]:
    """As many cases of every row as there is time for, which rows share evenly; what one leaves is for those behind it.

    A row gets one case, however little time is left. Of the cases that had no time the number is ``left_out``.
    """
    found, end = [], time.monotonic() + 60 * minutes
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(str(runner), total=len(rows))
        for n, row in enumerate(rows):
            begin, runs = time.monotonic(), covering_first(runner, row)
            until, results = begin + (end - begin) / (len(rows) - n), []
            for run in runs:
                results.append(outcome(runner, *run))
                if time.monotonic() > until:
                    break
            found.append(_outcome(row, results))
            found[-1][1].update(left_out=len(runs) - len(results), seconds=round(time.monotonic() - begin, 1))
            progress.advance(task)
    return found


def _outcome(row: Row, results: list[float | str | None]) -> tuple[Outcome, dict[str, Any]]:
    """What the results of a row's cases come to: errors by tolerance, messages of failures, None for refused cases."""
    wrong = [r for r in results if isinstance(r, str)]
    worst = max((r for r in results if isinstance(r, float)), default=0.0)
    one = Outcome(row, len(results) - results.count(None) - len(wrong), results.count(None), len(wrong))
    return one, {"error_of_tolerance": worst, "messages": wrong[:20]}


def _on_mac(runner: Runner, rows: list[Row], file: Path | None) -> int:
    """The same on an Apple GPU, which must get a known answer right first, with a report file. Returns the failures."""
    from torch_attnkit.mps import report as mac

    found = mac.begin(Target("metal"), "mps", "parity")
    why = mac.trusted(found)
    if why:
        console.print(f"[red]{escape(why)}[/red]")
    else:
        runner = Runner("mps", str(found["machine"]["gpu"]), runner.target)
        outcomes = run_for(runner, rows, MINUTES)
        console.print(_table(runner, outcomes))
        found["parity"] = [
            {
                "row": evidence.row_title(o.row[0].name, o.row[2]),
                "passed": o.passed,
                "refused": o.refused,
                "failed": o.failed,
            }
            | more
            for o, more in outcomes
        ]
    console.print(mac.write(found, file or mac.default_file("parity")), soft_wrap=True)
    return 1 if why else sum(row["failed"] for row in found["parity"])
