"""Where each row of the table has been seen right, and with which code: the files of ``torch_attnkit/evidence/``.

A file holds the runs on one device or simulator, a run the rows that it was the last to look at. Evidence belongs to
what ran, and every row is kept with two digests of it. ``sources`` is quick: of the modules that the row's launcher
imports or names, the Metal text, the reference, the cases, in a simulator the simulator. While it is the same, nothing
has changed. ``runs`` is exact: of the definition, the cases, and for each of these what is launched (``launched.py``),
which takes a compiler to know. Where the one has changed and the other has not, ``parity --resign`` says so in the
file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_attnkit import digest
from torch_attnkit.core import Kernel, Op, Target, runtimes
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support

from . import launched
from .case import cases

FOLDER = Path(__file__).resolve().parent.parent / "evidence"
Row = tuple[Op, int, Kernel, str]  # as ``support()`` lists them: op, index, row, arch
Map = Callable[..., Iterable[str]]


@dataclass(frozen=True)
class Seen:
    """A device or simulator where all cases of a row have passed, and whether with the code that stands now."""

    where: str
    current: bool

    def __str__(self) -> str:
        return self.where if self.current else f"{self.where} (older code)"


@dataclass(frozen=True)
class Outcome:
    """How the cases of one row went."""

    row: Row
    passed: int
    refused: int
    failed: int

    def entry(self) -> dict[str, Any]:
        """It as evidence and reports have it."""
        name = row_title(self.row[0].name, self.row[2])
        return {"row": name, "passed": self.passed, "refused": self.refused, "failed": self.failed}


def row_title(op: str, row: Kernel) -> str:
    """A row with all that it claims: evidence for a narrower row does not count for a wider one."""
    dims = " ".join(f"{axis}={','.join(map(str, sizes))}" for axis, sizes in row.dims.items())
    return " | ".join((f"{op}/{row.on}", row.dtypes, dims, row.features, "; ".join(row.needs)))


def _simulator_of(arch: str) -> str:
    return digest.of_simulator("metal") if arch == "metal" else digest.of_simulator("ptx", arch)


@functools.cache
def sources_of(op: str, index: int, target: Target) -> str:
    """The digest of the sources that the result of a row depends on, on hardware or in a simulator."""
    record = OPS[op]
    row = record.kernels[index]
    narrow = ["torch_attnkit.oracle.hopper_sums"] if row.launcher and row.launcher.narrow_sums else []
    parts = [
        digest.of_modules(*record.entries(row), *narrow, arch=target.arch),
        digest.of_modules(f"{record.package}.reference", "torch_attnkit.oracle.compare"),
        digest.of_definitions(f"{record.package}.cases", "PARITY", "DEGENERATE", "EXTRAS", "make"),
        digest.of_definitions("torch_attnkit.parity.case", "arguments"),
        *(case.id for case in cases(record, index, target.arch, covering=target.simulated)),
    ]
    if target.arch == "metal":
        parts.append(digest.of_metal(op))
    if "torch_attnkit.cpu" in digest.reach(*record.entries(row), arch=target.arch):
        parts.append(digest.of_cpu())
    if target.simulated:
        parts.append(_simulator_of(target.arch))
    return digest.of(*parts)


def require(target: Target) -> None:
    """Raise UnsupportedError, before any case has run, unless ``runs_of`` can say what cases run: for that it records
    their launches in the target's simulator, on hardware too."""
    if target.arch != "cpu":
        runtimes.require_simulator(target.arch)


def runs_of(op: str, index: int, target: Target, each: Map = map) -> str:
    """The digest of what the cases of a row run, and of what they are judged by. Compiles what has not been.

    ``each`` is a ``map``, by several processes for instance.
    """
    record = OPS[op]
    row = record.kernels[index]
    todo = cases(record, index, target.arch, covering=target.simulated)
    parts = [
        digest.of_meaning(f"{record.package}.reference", "reference", "numbers", "check"),
        digest.of_meaning("torch_attnkit.oracle.compare", "check"),
        digest.of_meaning(f"{record.package}.cases", "PARITY", "DEGENERATE", "EXTRAS", "make", "shared"),
        digest.of_meaning("torch_attnkit.parity.case", "arguments"),
        *(case.id for case in todo),
    ]
    if target.arch == "cpu":
        parts += [*(digest.of_meaning(file, "build") for file in record.sources(row)), digest.of_cpu()]
    else:
        parts += each(functools.partial(launched.by, target=replace(target, simulated=True)), todo)
    if row.launcher and row.launcher.narrow_sums:
        parts.append(digest.of_meaning("torch_attnkit.oracle.hopper_sums", "TensorCoreSums"))
    if target.simulated:
        parts.append(_simulator_of(target.arch))
    return digest.of(*parts)


def file_of(target: Target, device: str) -> Path:
    """The file of a device's evidence, or of a simulator's."""
    return FOLDER / f"{target.arch}-{'simulator' if target.simulated else device}.json".lower().replace(" ", "-")


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def load() -> list[dict[str, Any]]:
    """All files of evidence there are."""
    return [json.loads(file.read_text()) for file in files()]


def seen(row: Row, files: Iterable[dict[str, Any]]) -> list[Seen]:
    """Where a row has been seen right, according to ``files``."""
    op, index, kernel, arch = row
    name, found = row_title(op.name, kernel), []
    for file in files:
        simulated = file["kind"] == "simulator"
        entries = [e for run in file["runs"] for e in run["rows"] if e["row"] == name]
        if file["arch"] == arch and any(e["passed"] > 0 and e["failed"] == 0 for e in entries):
            current = any(e["sources"] == sources_of(op.name, index, Target(arch, simulated)) for e in entries)
            found.append(Seen("simulator" if simulated else f"on {file['device'].removeprefix('NVIDIA ')}", current))
    return found


def stale(target: Target, device: str) -> list[Row]:
    """The rows of a target that have not been seen right there with the code that stands now."""
    file = file_of(target, device)
    files = [json.loads(file.read_text())] if file.exists() else []
    return [row for row in support(target.arch) if not any(s.current for s in seen(row, files))]


def record(target: Target, device: str, run: dict[str, Any], outcomes: list[Outcome], each: Map = map) -> Path:
    """Keep how rows went in a run that ``run`` describes. Other rows stay as they were seen; what left the table goes.

    Several rows of one arch may be worded alike only if they are one; a failed row is kept, and counts for nothing.
    """
    rows = []
    for o in outcomes:
        key = (o.row[0].name, o.row[1], target)
        rows.append(o.entry() | {"sources": sources_of(*key), "runs": runs_of(*key, each)})
    path = file_of(target, device)
    before = json.loads(path.read_text())["runs"] if path.exists() else []
    keep = {row_title(op.name, row) for op, _, row, _ in support(target.arch)} - {r["row"] for r in rows}
    runs = [old | {"rows": [r for r in old["rows"] if r["row"] in keep]} for old in before]
    same = next((r for r in runs if {k: v for k, v in r.items() if k != "rows"} == run), None)
    if same is None:
        runs.append(run | {"rows": rows})
    else:
        same["rows"] += rows
    kind = "simulator" if target.simulated else "hardware"
    found: dict[str, Any] = {"arch": target.arch, "kind": kind, "device": device}
    found |= {"built for": target.built_for} if target.built_for else {}
    found |= {"runs": [r for r in runs if r["rows"]]}
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


@dataclass(frozen=True)
class Signed:
    """A row whose evidence was looked at again: does it run the ``same`` as it did?"""

    name: str
    same: bool

    def __str__(self) -> str:
        return "carried over" if self.same else "of other code"


def resign(file: Path, ops: Iterable[str], each: Map = map) -> list[Signed]:
    """Carry the evidence in ``file`` over to the sources that stand now, row by row, where what runs is the same.

    A row that was seen with these very sources, before there were such digests, gets one.
    """
    found = json.loads(file.read_text())
    target = Target(found["arch"], found["kind"] == "simulator", found.get("built for", ""))
    rows = {row_title(op.name, row): (op.name, index) for op, index, row, _ in support(target.arch) if op.name in ops}
    signed = []
    for entry in [e for run in found["runs"] for e in run["rows"] if e["row"] in rows]:
        now = sources_of(*rows[entry["row"]], target)
        if entry["sources"] == now and "runs" in entry:
            continue
        same = entry["sources"] == now or "runs" in entry
        if same:
            runs = runs_of(*rows[entry["row"]], target, each)
            same = entry.setdefault("runs", runs) == runs
        if same:
            entry["sources"] = now
            file.write_text(json.dumps(found, indent=1) + "\n")  # what is cut off has not been for nothing
        signed.append(Signed(entry["row"], same))
    return signed
