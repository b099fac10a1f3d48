"""The command line of the bench."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

import torch_attnkit
from bench import mps, run, timing
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES

ROOT = Path(__file__).resolve().parent
PACKAGES = (
    "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "flash-attn-4", "quack-kernels", "fla-core", "humming-kernels",
)  # fmt: skip
console = Console(width=200 if not sys.stdout.isatty() else None)


def main(
    op: Annotated[str, typer.Argument(help="Name of an op; on a Mac also gpt-oss-20b or deepseek-v4-flash.")],
    peers: Annotated[bool, typer.Option(help="Time everything else that computes the same, in the same run.")] = False,
    case: Annotated[str, typer.Option(help="Only the cases whose name contains this.")] = "",
    dtype: Annotated[str, typer.Option(help="Model dtype: bf16, f16, f32 or f8e4m3.")] = "bf16",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    baseline: Annotated[bool, typer.Option(help="Put the result into bench/baselines/<device>.json.")] = False,
    prepare: Annotated[
        bool, typer.Option(help="Time nothing: let ours and all peers compile; some of these may run side by side.")
    ] = False,
) -> None:
    """Time one op on this machine's GPU: parity first, cold inputs, CUDA graph and eager, medians."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype is {dtype!r}, accepted: bf16, f16, f32, f8e4m3")
    if op in mps.MODELS:
        if not torch.backends.mps.is_available():
            raise typer.BadParameter(f"{op} is timed on a Mac, accepted here: an op")
        raise typer.Exit(mps.model(op, DTYPES[dtype], json_file, console))
    if op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are {', '.join(OPS)}")
    names = OPS[op].module("cases").BENCH
    if not any(case in name for name in names):
        raise typer.BadParameter(f"no case of {op} has {case!r} in its name; there are {', '.join(names)}")
    if torch.backends.mps.is_available():
        raise typer.Exit(mps.main(OPS[op], DTYPES[dtype], case, json_file, console))
    if not torch.cuda.is_available():
        raise typer.BadParameter("the bench needs a CUDA device; simulated runs are not timed")
    if prepare:
        for name, failed in run.prepare(OPS[op], DTYPES[dtype], case):
            console.print(f"{op} {name}: {failed or 'ready'}", soft_wrap=True, highlight=False, markup=False)
        return
    given = " ".join(sys.argv[1:])
    if json_file:  # where that file lay is nobody's concern
        given = given.replace(str(json_file), json_file.name)
    record = facts() | {"command": f"python -m bench {given}", "limits": timing.limits(), "lines": []}
    console.print(
        f"{op} on {record['device']}: torch {torch.__version__}, commit {record['commit']}; limits here: copy "
        f"{record['limits']['copy']:.2f} TB/s, bf16 8192^3 {record['limits']['bf16']:.0f} TFLOP/s"
    )
    for line in run.lines(OPS[op], DTYPES[dtype], case, record["limits"], peers):
        record["lines"].append(line)
        console.print(describe(line), soft_wrap=True, highlight=False)
        if json_file:  # as soon as it is there: a bench may be stopped
            json_file.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(op, record["lines"]))
    for name, why in sorted({m for line in record["lines"] for m in line.get("missing", {}).items()}):
        console.print(f"missing peer {name}: {why}", soft_wrap=True)
    if baseline:
        merge(record)
    raise typer.Exit(any("error" in line for line in record["lines"]))


def facts() -> dict[str, Any]:
    """What a reader needs to repeat the run."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    versions = {"torch_attnkit": torch_attnkit.__version__, "torch": torch.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    dirty = "+" if output("git", "status", "--porcelain", "--untracked-files=no") not in ("", "unknown") else ""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "versions": versions,
        "commit": output("git", "rev-parse", "--short", "HEAD") + dirty,
        "date": datetime.date.today().isoformat(),
    }


def describe(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"[red]{line['case']}: no number: {line['error']}[/red]"
    others = ", ".join(f"{n} {p['us']:.1f} us ({p['ratio']:.2f})" for n, p in line["peers"].items() if "us" in p)
    return f"{line['case']}: {line['us']:.1f} us, {line['rate']}, {line['fraction']:.0%} of the limit; {others}"


def table(op: str, lines: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(n for line in lines for n, p in line.get("peers", {}).items() if "us" in p))
    columns = ("case", "us", "eager us", "host us", "rate", "of limit", "error / tol", *(f"vs {n}" for n in names))
    out = Table(
        *(Column(c, overflow="fold") for c in columns),
        title=f"{op}: CUDA graph, median; ratios are the peer's time / ours",
    )
    for line in lines:
        if "error" in line:
            out.add_row(line["case"], "none", *("-" for _ in columns[2:]), style="red")
            continue
        cells = (
            f"{line['us']:.2f}",
            f"{line['us_eager']:.2f}",
            f"{line['us_host']:.1f}",
            line["rate"],
            f"{line['fraction']:.0%}",
        )
        ratios = (f"{line['peers'][n]['ratio']:.2f}" if "us" in line["peers"].get(n, {}) else "-" for n in names)
        out.add_row(line["case"], *cells, f"{line['error_of_tolerance']:.2f}", *ratios)
    return out


def merge(record: dict[str, Any]) -> None:
    """Put the lines of a run into the device's baseline."""
    if all("error" in line for line in record["lines"]):
        return
    file = ROOT / "baselines" / f"{record['device'].lower().replace(' ', '-')}.json"
    file.parent.mkdir(exist_ok=True)
    old = json.loads(file.read_text()) if file.exists() else {"ops": {}}
    op = record["lines"][0]["op"]
    old["ops"][op] = merged(old["ops"].get(op), record, list(OPS[op].module("cases").BENCH))
    file.write_text(json.dumps(old, indent=1) + "\n")
    console.print(f"baseline {file.relative_to(ROOT.parent)} holds {', '.join(old['ops'])}")


def merged(old: dict[str, Any] | None, new: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """The record of an op after a run of some of its ``cases``, in their order; what is none of them any more goes.

    The facts are those of the new run. A line of an earlier one holds under ``run`` what was different then; a new line
    without a number leaves it where it was.
    """
    facts = {k: v for k, v in new.items() if k != "lines"}
    lines = {}
    for line in old["lines"] if old else ():
        then = {k: v for k, v in old.items() if k != "lines"} | line.get("run", {})
        different = {k: v for k, v in then.items() if facts.get(k) != v}
        lines[line["case"], line["dtype"]] = {k: v for k, v in line.items() if k != "run"} | {"run": different}
    lines |= {(line["case"], line["dtype"]): line for line in new["lines"] if "error" not in line}
    known = [
        lines[key] for key in sorted(lines, key=lambda k: cases.index(k[0]) if k[0] in cases else -1) if key[0] in cases
    ]
    return facts | {"lines": known}


if __name__ == "__main__":
    typer.run(main)
