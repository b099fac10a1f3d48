"""SUPPORT.md: the table, and for every row on what evidence it stands. ``make support`` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from string import ascii_lowercase

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Kernel, Op
from torch_attnkit.core.support import support
from torch_attnkit.oracle.rules import SAME_DIM
from torch_attnkit.parity import evidence

ARCHS = {
    "cpu": "CPU",
    "metal": "Apple GPU (Metal)",
    "sm80": "NVIDIA Ampere (sm80)",
    "sm89": "NVIDIA Ada (sm89)",
    "sm90": "NVIDIA Hopper (sm90)",
    "sm100": "NVIDIA Blackwell (sm100)",
    "sm120": "NVIDIA GeForce RTX 50, RTX PRO, DGX Spark (sm120)",
}
_HEAD = """\
# What runs where

Generated from the op table by `python -m torch_attnkit support --write SUPPORT.md`; a test fails when it is stale.

Every op runs on CPU tensors in any of float32, bfloat16, float16 and float64 as its own plain-PyTorch definition (the
*reference*). On a GPU an op runs as a kernel or raises `UnsupportedError`; it never falls back. *Evidence* says where a
row's parity cases have passed against the float64 reference: `on` a device, in a CPU `simulator`, or `not yet`. A
simulated pass is never shown as one on hardware. Evidence belongs to code: once a row's kernel, its reference, its
cases or its simulator have changed, it is of `older code`, and left out where a device has run what stands now, until
`python -m torch_attnkit parity --stale` has run it again.

## Ops

Where kernels of each op have been seen right; `reference`: there is none for a CPU.

"""
_KERNELS = """
## Kernels

Rows of an op that differ in target or sizes alone share a line with the sizes of each; (D, Dv) (192, 128), (576, 512)
are two. Evidence behind a target's name is that target's alone. *Features* are those of the op that the kernels take.
*Also needs* names further conditions by their letters. Files are in `torch_attnkit/kernels` or, those without a folder,
in `torch_attnkit/ops`, in the op's own. Schemas, arguments and limits in words are in `docs/ops`.
"""


@dataclass(frozen=True)
class Line:
    """Rows of one op that differ in nothing but their sizes; targets have the same, each with evidence of its own."""

    seen: dict[str, tuple[str, ...]]  # by target
    file: str
    rows: tuple[Kernel, ...]

    @property
    def evidence(self) -> str:
        """What all targets have, then what one has besides."""
        each = {arch: seen or ("not yet",) for arch, seen in self.seen.items()}
        common = [word for word in next(iter(each.values())) if all(word in seen for seen in each.values())]
        own = [f"{arch} {word}" for arch, seen in each.items() for word in seen if word not in common]
        return "; ".join(common + own)


def stated(seen: list[evidence.Seen]) -> tuple[str, ...]:
    """Evidence in words: that of older code alone where no device has run what stands now."""
    current = any(s.current and s.where != "simulator" for s in seen)
    return tuple(str(s) for s in seen if s.current or not current)


def sizes(rows: Iterable[Kernel]) -> str:
    """The sizes that rows which differ in nothing else take."""
    rows = list(rows)
    axes = tuple(rows[0].dims)
    if not axes:
        return "any sizes"
    if len(axes) == 1:
        return f"{axes[0]} {', '.join(str(n) for row in rows for n in row.dims[axes[0]])}"
    if all(len(row.dims[a]) == 1 for row in rows for a in axes):
        found = [[str(row.dims[a][0]) for a in axes] for row in rows]
        equal = [shape[0] for shape in found if len(set(shape)) == 1]
        others = [f"({', '.join(shape)})" for shape in found if len(set(shape)) > 1]
        parts = [f"{' = '.join(axes)} {', '.join(equal)}"] * bool(equal)
        return "; ".join([*parts, *[f"({', '.join(axes)}) {', '.join(others)}"] * bool(others)])
    each = ("; ".join(f"{a} {', '.join(map(str, row.dims[a]))}" for a in axes) for row in rows)
    return " or ".join(each)


def expanded(row: Kernel) -> list[Kernel]:
    """``row``, or a row for each of its sizes if the need that Dv is D can be said by them."""
    if not SAME_DIM.keys() <= row.needs.keys() or tuple(row.dims) != ("D",):
        return [row]
    needs = {need: holds for need, holds in row.needs.items() if need not in SAME_DIM}
    return [replace(row, dims={"D": (n,), "Dv": (n,)}, needs=needs) for n in row.dims["D"]]


def joined(rows: Iterable[tuple[Kernel, str, str, tuple[str, ...]]]) -> list[Line]:
    """An op's rows, each with its target, file and evidence, by target: what differs in sizes, target or a target's
    evidence alone is one line."""
    alike: dict[tuple[object, ...], Line] = {}
    known: dict[int, list[Kernel]] = {}  # by identity: several targets have the same row
    for row, arch, file, seen in rows:
        for one in known.setdefault(id(row), expanded(row)):
            key = (arch, file, seen, one.dtypes, tuple(one.dims), one.features, tuple(one.needs))
            line = alike.get(key, Line({arch: seen}, file, ()))
            alike[key] = replace(line, rows=(*line.rows, one))
    of_targets: dict[tuple[object, ...], Line] = {}
    order = list(ARCHS)
    for line in sorted(alike.values(), key=lambda found: order.index(next(iter(found.seen)))):
        each = (tuple((axis, *sizes) for axis, sizes in row.dims.items()) for row in line.rows)
        alike_rows = (line.file, line.rows[0].dtypes, line.rows[0].features, tuple(line.rows[0].needs), *each)
        same = of_targets.get(alike_rows, line)
        of_targets[alike_rows] = replace(same, seen=same.seen | line.seen)
    return list(of_targets.values())


def section(op: Op, lines: list[Line]) -> Iterator[str]:
    """The kernels of an op: its features, what some of them need besides, and a line for rows that are alike."""
    needs = dict.fromkeys(need for line in lines for row in line.rows for need in row.needs)
    letters = dict(zip(needs, ascii_lowercase, strict=False))
    assert len(letters) == len(needs), f"{op.name} has more conditions than there are letters"
    differ = any(_features(op, row) != "all" for line in lines for row in line.rows)
    yield f"\n### `{op.name}`\n"
    if op.features:
        yield f"Features{'' if differ else ', each in every line'}: {', '.join(op.features)}.\n"
    if needs:
        yield f"Needs: {'; '.join(f'({letter}) {need}' for need, letter in letters.items())}.\n"
    columns = ["target", "dtypes", "sizes", *["features"] * differ, *["also needs"] * bool(needs)]
    yield f"| {' | '.join([*columns, 'file', 'evidence'])} |"
    yield "|-" * (len(columns) + 2) + "|"
    for line in lines:
        row = line.rows[0]
        cells = [", ".join(line.seen), row.dtypes.replace(" ", ", "), sizes(line.rows).removesuffix(" sizes")]
        cells += [_features(op, row)] if differ else []
        cells += [" ".join(letters[need] for need in row.needs) or "-"] if needs else []
        yield f"| {' | '.join([*cells, line.file, line.evidence])} |"


def _features(op: Op, row: Kernel) -> str:
    """The row's features in the shorter words."""
    taken = row.features.split()
    without = [name for name in op.features if name not in taken]
    if not without:
        return "all"
    if not taken:
        return "none"
    return f"all but {', '.join(without)}" if len(without) < len(taken) else ", ".join(taken)


def support_markdown() -> str:
    """The text of SUPPORT.md."""
    files = evidence.load()
    rows: dict[str, list[tuple[Kernel, str, str, tuple[str, ...]]]] = {name: [] for name in OPS}
    for op, i, row, arch in support():
        seen = stated(evidence.seen((op, i, row, arch), files))
        rows[op.name].append((row, arch, _file(op, row), seen))
    parts = [f"{_HEAD}| op | {' | '.join(ARCHS.values())} |", "|-" * (len(ARCHS) + 1) + "|"]
    for name, entries in rows.items():
        cells = []
        for arch in ARCHS:
            here = [seen for _, a, _, seen in entries if a == arch]
            words = sorted({w for seen in here for w in seen}) or ["not yet"] * bool(here)
            cells.append("; ".join(words) or ("reference" if arch == "cpu" else "no kernel"))
        parts.append(f"| `{name}` | {' | '.join(cells)} |")
    parts.append(_KERNELS.rstrip())
    for name, op in OPS.items():
        parts += section(op, joined(rows[name]))
    return "\n".join(parts) + "\n"


def _file(op: Op, row: Kernel) -> str:
    """What takes the row's calls, as a file of the package."""
    module = op.sources(row)[0].removeprefix("torch_attnkit.kernels.").removeprefix(f"{op.package}.")
    return module.replace(".", "/") + ".py"
