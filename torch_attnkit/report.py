"""SUPPORT.md: the table, and for every row on what evidence it stands. ``make support`` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from torch_attnkit.core import Kernel
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.support import support

EVIDENCE = Path(__file__).parent / "evidence"
ARCHS = {
    "cpu": "CPU",
    "metal": "Apple GPU (Metal)",
    "sm90": "NVIDIA Hopper (sm90)",
    "sm100": "NVIDIA Blackwell (sm100)",
}
_HEAD = """\
# What runs where

Generated from the op table by `python -m torch_attnkit support --write SUPPORT.md`; a test fails when it is stale.

Every op runs on CPU tensors in any of float32, bfloat16, float16 and float64 as its own plain-PyTorch definition (the
*reference*). On a GPU an op runs as a kernel or raises `UnsupportedError`; it never falls back. The rows below are the
kernels there are. *Evidence* says where a row's parity cases have passed against the float64 reference: on
`hardware (which)`, in a CPU `simulator`, or `not yet`. A simulated pass is never shown as a hardware pass.
"""


def row_id(op: str, row: Kernel) -> str:
    """A row with all that it claims: evidence for a narrower row does not count for a wider one."""
    dims = " ".join(f"{axis}={','.join(map(str, sizes))}" for axis, sizes in row.dims.items())
    return " | ".join((f"{op}/{row.file}", row.dtypes, dims, row.features))


def evidence() -> dict[tuple[str, str], list[str]]:
    """(row id, arch) to where all its parity cases have passed: ``hardware (device)`` or ``simulator``."""
    seen: dict[tuple[str, str], list[str]] = {}
    for file in sorted(EVIDENCE.glob("*.json")):
        run = json.loads(file.read_text())
        where = "simulator" if run["kind"] == "simulator" else f"hardware ({run['device']})"
        for key in (row["row"] for row in run["rows"] if row["failed"] == 0 and row["passed"] > 0):
            seen.setdefault((key, run["arch"]), []).append(where)
    return seen


def support_markdown() -> str:
    """The text of SUPPORT.md."""
    seen = evidence()
    rows = [(op.name, row, arch, seen.get((row_id(op.name, row), arch), [])) for op, _, row, arch in support()]
    parts = [_HEAD, "## Ops\n", "| op | " + " | ".join(ARCHS.values()) + " |", "|---" * (len(ARCHS) + 1) + "|"]
    for name in OPS:
        cells = []
        for arch in ARCHS:
            mine = [where for op, _, a, where in rows if (op, a) == (name, arch)]
            words = sorted({w for where in mine for w in where}) or (["not yet"] if mine else [])
            reference = ["reference"] if arch == "cpu" else []
            cells.append("; ".join(reference + [f"kernel: {w}" for w in words]) or "no kernel")
        parts.append(f"| `{name}` | " + " | ".join(cells) + " |")
    columns = ("op", "arch", "file", "dtypes", "sizes", "features", "also needs", "evidence")
    parts += ["\n## Kernels\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for op, row, arch, where in rows:
        sizes = "; ".join(f"{axis}: {', '.join(map(str, values))}" for axis, values in row.dims.items())
        parts.append(
            f"| `{op}` | {arch} | {row.file}.py | {row.dtypes.replace(' ', ', ')} | {sizes or 'any'} | "
            f"{row.features.replace(' ', ', ') or 'none'} | {'; '.join(row.needs) or 'nothing'} | "
            f"{'; '.join(where) or 'not yet'} |"
        )
    parts += ["\n## Schemas\n", *(f"- `{op.schema}`" for op in OPS.values())]
    return "\n".join(parts) + "\n"
