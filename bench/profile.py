"""Why a case takes its time: ours and its peers under Nsight Compute, ``python -m bench.profile OP`` or ``--below``.

``--below`` takes the cases of a baseline in which a peer is ahead, and that peer. Every row is one call: its launches,
what they moved, and how busy the parts of the chip were, sums over the launches or means over their time. Processes of
some cases each run ``bench.profiled`` under ``ncu``, two a device, of which one imports while the other is profiled.
Caches are emptied ahead of every launch and clocks left alone. A launch is alone on the chip: what overlaps the launch
before it does not here, so times are compared with one another, not with the bench's.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from bench import ncu, peers
from bench.profiled import MARK, NOT_TAKEN, OURS

ROOT = Path(__file__).resolve().parent
BASELINE = ROOT / "baselines" / "nvidia-h200.json"
console = Console(width=220 if not sys.stdout.isatty() else None, soft_wrap=True, highlight=False)

_CASES = 8  # of a process under ncu: it takes seconds to start, and what it found is written when it ends
_GRACE = 40  # seconds for the case that a process is at when time is up
_PREPARED = 2  # of a process that only compiles
_COMPILING = (  # peers, those first that take longest
    "FlashInfer", "FA4", "Humming", "Humming grouped", "DeepGEMM", "DeepGEMM, vLLM", "compile", "triton_kernels", "fla",
    "quack",
)  # fmt: skip


Key = tuple[str, str, str]  # op, dtype, case
Chosen = dict[Key, tuple[str, ...]]  # contenders
Timed = dict[Key, dict[str, float]]  # microseconds of contenders


@dataclass(frozen=True)
class Job:
    """Cases of one op for one process: which contenders of each."""

    op: str
    dtype: str
    cases: dict[str, tuple[str, ...]]


def below(file: Path, ops: Iterable[str] = ()) -> Timed:
    """The lines of a baseline in which the best peer is ahead: microseconds of ours and of it."""
    recorded = json.loads(file.read_text())["ops"]
    found: Timed = {}
    for op in ops or recorded:
        for line in recorded.get(op, {"lines": ()})["lines"]:
            timed = {n: p["us"] for n, p in line.get("peers", {}).items() if "us" in p}
            best = min(timed, key=lambda n: timed[n], default=None)
            if best is not None and timed[best] < line["us"]:
                found[op, line["dtype"], line["case"]] = {OURS: line["us"], best: timed[best]}
    return found


def jobs(chosen: Chosen, size: int) -> list[Job]:
    """The processes of what was chosen: cases of one op and dtype, ``size`` at most, in their order."""
    made: list[Job] = []
    for (op, dtype, case), contenders in chosen.items():
        open_ = next((j for j in made if (j.op, j.dtype) == (op, dtype) and len(j.cases) < size), None)
        if open_ is None:
            made.append(open_ := Job(op, dtype, {}))
        open_.cases[case] = contenders
    return made


def preparing(chosen: Chosen) -> list[Job]:
    """The processes that compile what was chosen: each contender's for itself."""
    made = []
    for name in (*_COMPILING, OURS):
        only: Chosen = {key: (name,) for key, contenders in chosen.items() if name in contenders}
        made += jobs(only, _PREPARED)
    return made


def records(calls: list[dict[str, Any]], found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The calls that were made, with what ncu found of them; a call that failed, or without anything, says so."""
    segments = iter(found)
    out = []
    for call in calls:
        seen = next(segments, []) if call["marked"] else []
        record = {k: v for k, v in call.items() if k != "marked"}
        whole = seen and "missing" not in call
        out.append(record | ncu.summed(seen) | {"launches": seen} if whole else {"missing": "ncu saw nothing"} | record)
    return out


# Running it ----------------------------------------------------------------------------------------------------------


def environment(device: str, folder: Path) -> dict[str, str]:
    """Of a process on ``device``: ncu's lock, by which only one process at a time profiles, is in TMPDIR, so that has
    to be another on each device, and no cache of compiled kernels may be there."""
    caches = folder / "caches"
    temporary = folder / f"device-{device}"
    temporary.mkdir(parents=True, exist_ok=True)
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(caches / "flash_attn"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }
    return own | dict(os.environ) | {"CUDA_VISIBLE_DEVICES": device, "TMPDIR": str(temporary)}


def _output(command: list[str], env: dict[str, str], patience: float) -> str:
    """What a process says; after ``patience`` seconds it and its children are stopped."""
    process = subprocess.Popen(
        command, cwd=ROOT.parent, env=env, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return process.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nstopped after {patience:.0f} s"


@dataclass(frozen=True)
class Runner:
    """How processes are started: by ``tool`` with ``names`` as metrics, or without, which only compiles."""

    folder: Path
    until: float
    tool: str | None = None
    names: dict[str, str] | None = None

    def run(self, number: int, job: Job, device: str) -> list[dict[str, Any]]:
        """The records of a job's calls."""
        here = self.folder / f"{'profile' if self.tool else 'prepare'}-{number}"
        here.mkdir(parents=True, exist_ok=True)
        calls, report, request = here / "calls.jsonl", here / "ncu.csv", here / "request.json"
        lock = str(self.folder / f"device-{device}.lock") if self.tool else None
        asked = {
            "op": job.op, "dtype": job.dtype, "cases": job.cases, "calls": str(calls), "until": self.until, "lock": lock
        }  # fmt: skip
        request.write_text(json.dumps(asked))
        for old in (calls, report):
            old.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench.profiled", str(request)]
        if self.tool:
            command = [*ncu.command(self.tool, self.names or {}, report), *command]
        output = _output(command, environment(device, self.folder), max(self.until - time.time(), 0) + _GRACE)
        made = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        text = report.read_text(errors="replace") if report.exists() else ""
        errors = "\n".join(line for line in text.splitlines() if line.startswith("==ERROR"))
        if self.tool and not (found := ncu.launches(text, self.names or {}, MARK)):
            made = []
        elif self.tool:
            made = records(made, found)
        return made + self._rest(job, made, f"{output}\n{errors}")

    def _rest(self, job: Job, made: list[dict[str, Any]], output: str) -> list[dict[str, Any]]:
        """Records of the calls that are not in ``made``: time was up, or the last words of the process."""
        output_lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("==PROF")]
        why = "time was up" if time.time() > self.until else " / ".join(output_lines[-3:])[-400:] or "nothing was said"
        measured = {(call["case"], call["contender"]) for call in made}
        wanted = [(case, who) for case, names in job.cases.items() for who in names if (case, who) not in measured]
        shared = {"op": job.op, "dtype": job.dtype, "missing": why}
        return [shared | {"case": case, "contender": who} for case, who in wanted]


def each(todo: list[Job], devices: list[str], per_device: int, run: Callable[[int, Job, str], Any]) -> Iterator[Any]:
    """What ``run`` gives for each job, as it comes: ``per_device`` at a time on each device, in their order."""
    waiting: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for numbered in enumerate(todo):
        waiting.put(numbered)

    def work(device: str) -> None:
        while True:
            try:
                number, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.put(run(number, job, device))
            except Exception as failure:
                results.put(failure)

    for _ in range(per_device):
        for device in devices:
            threading.Thread(target=work, args=(device,), daemon=True).start()
    for _ in todo:
        result = results.get()
        if isinstance(result, Exception):
            raise result
        yield result


# What is shown -------------------------------------------------------------------------------------------------------


def describe(call: dict[str, Any]) -> str:
    head = f"{call['op']} {call['case']} {call['contender']}"
    if "missing" in call:
        return f"{head}: {call['missing']}"
    if "nearest" not in call:
        return f"{head}: {len(call['launches'])} launches"
    word = call["nearest"]
    name = next(k for k, v in ncu.LIMITS.items() if v == word)
    return f"{head}: {len(call['launches'])} launches, {call['us']:.1f} us, {word} {call[name]:.0f} %"


def table(op: str, calls: list[dict[str, Any]]) -> Table:
    percents = ("dram", "l2", "tensor", "issue", "xu", "fma", "alu", "sm_active", "warps")
    heads = ("DRAM", "L2", "tensor", "issue", "XU", "FMA", "ALU", "SM active", "warps")
    columns = ("case", "", "bench us", "us", "read MB", "written", "L2>SM MB", *(f"{h} %" for h in heads), "GHz")
    out = Table(*columns, Column("launches: grid x block, registers, KB", overflow="fold"), title=op)
    for call in calls:
        bench = f"{call['bench_us']:.1f}" if "bench_us" in call else "-"
        if "missing" in call:
            out.add_row(call["case"], call["contender"], bench, *("-" for _ in columns[3:]), Text(call["missing"]))
            continue
        figures = (f"{call['us']:.1f}", *(f"{call[n] / 1e6:.1f}" for n in ncu.SUMS[1:]))
        shares = (f"{call[p]:.0f}" if p in call else "-" for p in percents)
        clock = f"{call['ghz']:.2f}" if "ghz" in call else "-"
        out.add_row(call["case"], call["contender"], bench, *figures, *shares, clock, _kinds(call["launches"]))
    return out


def _kinds(found: list[dict[str, Any]]) -> str:
    """The launches, those of one kernel with one grid as one."""
    count: dict[str, int] = {}
    us: dict[str, float] = {}
    for x in found:
        shape = " x ".join("*".join(str(n) for n in _trimmed(x[what])) for what in ("grid", "block"))
        text = f"{x['name']} {shape}, {x.get('registers', 0):.0f}, {x.get('smem', 0) / 1e3:.0f}"
        count[text] = count.get(text, 0) + 1
        us[text] = us.get(text, 0.0) + x.get("us", 0.0)
    return "; ".join(f"{f'{n} of ' if n > 1 else ''}{text}: {us[text]:.1f} us" for text, n in count.items())


def _trimmed(sizes: list[int]) -> list[int]:
    """Without ones at the end."""
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes


def show(calls: list[dict[str, Any]]) -> None:
    for op in dict.fromkeys(call["op"] for call in calls):
        console.print(table(op, [call for call in calls if call["op"] == op]))


def main(
    ops: Annotated[list[str] | None, typer.Argument(help="Names of ops, in the order in which they matter.")] = None,
    only_below: Annotated[bool, typer.Option("--below", help="Cases with a peer ahead in the baseline.")] = False,
    baseline: Annotated[Path, typer.Option(help="The baseline of --below.")] = BASELINE,
    case: Annotated[str, typer.Option(help="Only the cases whose name contains this.")] = "",
    peer: Annotated[list[str] | None, typer.Option(help="A peer; may be repeated. Default: all, or the best.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="A further metric of ncu, for the JSON.")] = None,
    only: Annotated[str, typer.Option(help="Only these: names of bench.ncu.METRICS with commas between them.")] = "",
    devices: Annotated[str, typer.Option(help="GPUs that share the work, such as 0,1.")] = "0",
    seconds: Annotated[float, typer.Option(help="After which no further case begins.")] = 1800,
    prepare: Annotated[bool, typer.Option(help="Profile nothing: compile, three processes for four cores.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    show_file: Annotated[Path | None, typer.Option("--show", help="Profile nothing: print such a file.")] = None,
) -> None:
    """Profile calls of ours and of peers under Nsight Compute: what limits them."""
    if show_file:
        show(json.loads(show_file.read_text())["calls"])
        return
    chosen, timed = choose(ops or [], only_below, baseline, case, peer or [])
    folder = Path(tempfile.gettempdir()) / f"attnkit-profile-{os.getuid()}"
    on = devices.split(",")
    runner = Runner(folder, time.time() + seconds)
    if prepare:
        todo = preparing(chosen)
        many = max(1, (os.cpu_count() or 4) * 3 // 4 // len(on))
        for calls in each(todo, on, many, runner.run):
            for call in calls:
                console.print(
                    f"{call['op']} {call['case']} {call['contender']}: {call.get('missing', 'ready')}", markup=False
                )
        return
    from bench.__main__ import facts

    try:
        tool = ncu.tool()
    except FileNotFoundError as missing:
        raise typer.BadParameter(str(missing)) from None
    named = ncu.available(tool, metric or ())
    if only:
        named = {name: of for name, of in named.items() if name in (*only.split(","), *(metric or ()))}
    runner = replace(runner, tool=tool, names=named)
    given = " ".join(sys.argv[1:]).replace(str(json_file), json_file.name if json_file else "")
    record = facts() | {"command": f"python -m bench.profile {given}", "metrics": runner.names, "calls": []}
    order = {key[:1] + key[2:]: i for i, key in enumerate(chosen)}
    for calls in each(jobs(chosen, _CASES), on, 2, runner.run):
        for call in calls:
            if call.get("missing") == NOT_TAKEN:
                continue
            us = timed.get((call["op"], call["dtype"], call["case"]), {}).get(call["contender"])
            record["calls"].append(call | ({} if us is None else {"bench_us": us}))
            console.print(describe(call), markup=False)
        record["calls"].sort(key=lambda c: order[c["op"], c["case"]])  # contenders stay as they came
        if json_file:  # as soon as it is there: a run may be stopped
            json_file.write_text(json.dumps(record, indent=1) + "\n")
    show(record["calls"])
    raise typer.Exit(all("missing" in call for call in record["calls"]))


def choose(ops: list[str], only_below: bool, baseline: Path, case: str, named: list[str]) -> tuple[Chosen, Timed]:
    """The contenders of each case, and what a baseline says that they took."""
    from torch_attnkit.core.dispatch import OPS

    for op in ops:
        if op not in OPS:
            raise typer.BadParameter(f"no op {op!r}; there are {', '.join(OPS)}")
    known = [p.name for p in peers.ALL]
    for name in named:
        if name not in known:
            raise typer.BadParameter(f"no peer {name!r}; there are {', '.join(known)}")
    if only_below:
        timed = {key: us for key, us in below(baseline, ops).items() if case in key[2]}
        if not timed:
            raise typer.BadParameter(f"no case of {baseline.name} has a peer ahead of it")
        return {key: (*us, *(n for n in named if n not in us)) for key, us in timed.items()}, timed
    if not ops:
        raise typer.BadParameter("which op? or --below")
    cases = {(op, "bfloat16", name): (OURS, *(named or known)) for op in ops for name in OPS[op].module("cases").BENCH}
    return {key: names for key, names in cases.items() if case in key[2]}, {}


if __name__ == "__main__":
    typer.run(main)
