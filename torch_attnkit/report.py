"""SUPPORT.md: the table, and for every row on what evidence it stands. ``make support`` writes it."""

from __future__ import annotations

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Kernel, Op
from torch_attnkit.core.support import support
from torch_attnkit.parity import evidence

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
`hardware (which)`, in a CPU `simulator`, or `not yet`. A simulated pass is never shown as a hardware pass. Evidence
belongs to code: once a row's kernel, its reference, its cases or its simulator have changed, it reads `before later
changes` until `python -m torch_attnkit parity --stale` has run it again.
"""


def support_markdown() -> str:
    """The text of SUPPORT.md."""
    files = evidence.load()
    rows = [
        (op, row, arch, [str(s) for s in evidence.seen((op, i, row, arch), files)]) for op, i, row, arch in support()
    ]
    parts = [_HEAD, "## Ops\n", "| op | " + " | ".join(ARCHS.values()) + " |", "|---" * (len(ARCHS) + 1) + "|"]
    for name in OPS:
        cells = []
        for arch in ARCHS:
            mine = [where for op, _, a, where in rows if (op.name, a) == (name, arch)]
            words = sorted({w for where in mine for w in where}) or (["not yet"] if mine else [])
            reference = ["reference"] if arch == "cpu" else []
            cells.append("; ".join(reference + [f"kernel: {w}" for w in words]) or "no kernel")
        parts.append(f"| `{name}` | " + " | ".join(cells) + " |")
    columns = ("op", "arch", "file", "dtypes", "sizes", "features", "also needs", "evidence")
    parts += ["\n## Kernels\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for op, row, arch, where in rows:
        sizes = "; ".join(f"{axis}: {', '.join(map(str, values))}" for axis, values in row.dims.items())
        parts.append(
            f"| `{op.name}` | {arch} | {_file(op, row)} | {row.dtypes.replace(' ', ', ')} | {sizes or 'any'} | "
            f"{row.features.replace(' ', ', ') or 'none'} | {'; '.join(row.needs) or 'nothing'} | "
            f"{'; '.join(where) or 'not yet'} |"
        )
    parts += ["\n## Schemas\n", *(f"- `{op.schema}`" for op in OPS.values())]
    return "\n".join(parts) + "\n"


def _file(op: Op, row: Kernel) -> str:
    """What takes the row's calls, as a file of the package."""
    return op.sources(row)[0].removeprefix("torch_attnkit.").replace(".", "/") + ".py"
