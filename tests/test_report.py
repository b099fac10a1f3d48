"""SUPPORT.md says all that the table says: rows that share a line are read back from it, with sizes and evidence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from torch_attnkit import report
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Kernel, Op
from torch_attnkit.core.support import support
from torch_attnkit.oracle.rules import SAME_DIM
from torch_attnkit.parity import evidence

Sizes = frozenset[tuple[str, str]]  # one size for each axis that a row names
Fact = tuple[str, str, str, frozenset[str], frozenset[str], frozenset[str], Sizes]


def each_size(text: str) -> Iterator[Sizes]:
    """``D 64, 128; bits 8``, ``D = Dv 64, 128; (D, Dv) (192, 128)`` or ``any``, one size for each axis at a time."""
    for part in text.split(" or "):
        if part == "any":
            yield frozenset()
        elif part.startswith("(") or " = " in part:
            for piece in part.split("; "):
                if piece.startswith("("):
                    axes, *tuples = re.findall(r"\(([^)]*)\)", piece)
                    yield from (frozenset(zip(axes.split(", "), one.split(", "), strict=True)) for one in tuples)
                else:
                    *names, (last, *values) = (words.split(" ") for words in piece.replace(",", "").split(" = "))
                    yield from (frozenset((name, n) for name in (*sum(names, []), last)) for n in values)
        else:
            axes = [axis.partition(" ") for axis in part.split("; ")]
            chosen = itertools.product(*([(name, n) for n in values.split(", ")] for name, _, values in axes))
            yield from map(frozenset, chosen)


def read(lines: list[str]) -> Iterator[Fact]:
    """What the section of an op says: target, file, dtypes, features, needs, evidence and sizes, for all of these."""
    features: list[str] = []
    needs: dict[str, str] = {}
    columns: list[str] = []
    for line in lines:
        if line.startswith("Features"):
            features = line.partition(": ")[2].rstrip(".").split(", ")
        elif line.startswith("Needs: "):
            parts = re.split(r"(?:^|; )\((\w)\) ", line.removeprefix("Needs: ").removesuffix("."))
            needs = dict(zip(parts[1::2], parts[2::2], strict=True))
        elif line.startswith("| "):
            cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
            if not columns:
                columns = cells
                continue
            row = dict(zip(columns, cells, strict=True))
            stated = row.get("features", "all")
            without = stated.removeprefix("all but ").split(", ") if stated.startswith("all but ") else []
            named = [] if stated == "none" else stated.split(", ")
            taken = {f for f in features if f not in without} if stated.startswith("all") else set(named)
            asked = {needs[letter] for letter in row.get("also needs", "-").split() if letter != "-"}
            targets, words = row["target"].split(", "), row["evidence"].split("; ")
            common = {word for word in words if word.split(" ")[0] not in targets}
            for target, sizes in itertools.product(targets, each_size(row["sizes"])):
                own = {word.removeprefix(f"{target} ") for word in words if word.startswith(f"{target} ")}
                yield (target, row["file"], row["dtypes"], frozenset(taken), frozenset(asked),
                       frozenset(common | own), sizes)  # fmt: skip


def of(row: Kernel, arch: str, file: str, seen: tuple[str, ...]) -> Iterator[Fact]:
    """The same of one row of the table."""
    for one in report.expanded(row):
        for chosen in itertools.product(*([(axis, str(n)) for n in values] for axis, values in one.dims.items())):
            features, needs = frozenset(one.features.split()), frozenset(one.needs)
            dtypes = one.dtypes.replace(" ", ", ")
            yield (arch, file, dtypes, features, needs, frozenset(seen or ("not yet",)), frozenset(chosen))


@pytest.fixture(scope="module")
def sections() -> dict[str, list[str]]:
    """The lines of SUPPORT.md behind each op's name."""
    _, *parts = report.support_markdown().split("\n### `")
    return {name: text.split("\n") for name, _, text in (part.partition("`\n") for part in parts)}


def test_every_op_has_a_section(sections):
    assert list(sections) == list(OPS)


@pytest.mark.parametrize("name", OPS)
def test_nothing_of_the_table_is_lost_where_rows_share_a_line(name, sections):
    files, want = evidence.load(), []
    for op, i, row, arch in support():
        if op.name == name:
            seen = report.stated(evidence.seen((op, i, row, arch), files))
            module = op.sources(row)[0].removeprefix("torch_attnkit.kernels.").removeprefix(f"{op.package}.")
            file = module.replace(".", "/") + ".py"
            want += of(row, arch, file, seen)
    assert set(read(sections[name])) == set(want)


def test_older_evidence_is_told_where_nothing_is_newer():
    old, new, simulated = evidence.Seen("on A", False), evidence.Seen("on B", True), evidence.Seen("simulator", True)
    assert report.stated([old, simulated]) == ("on A (older code)", "simulator")
    assert report.stated([old, new, simulated]) == ("on B", "simulator")
    assert report.stated([evidence.Seen("simulator", False)]) == ("simulator (older code)",)


def test_a_need_that_sizes_can_say_is_said_by_them():
    row = Kernel("sm90", "bf16", {"D": (64, 128)}, "", SAME_DIM)
    assert [(one.dims, list(one.needs)) for one in report.expanded(row)] == [
        ({"D": (64,), "Dv": (64,)}, []),
        ({"D": (128,), "Dv": (128,)}, []),
    ]
    assert report.sizes(report.expanded(row)) == "D = Dv 64, 128"
    other = Kernel("sm90", "bf16", {"D": (64, 128), "bits": (8,)}, "", row.needs)
    assert report.expanded(other) == [other]


def test_features_that_every_line_has_are_said_once():
    rows = [Kernel("cpu", "f32", {}, "scaled"), Kernel("mps", "f32", {}, "scaled")]
    op = Op("toy(Tensor x) -> Tensor out", {}, tuple(rows), features={"scaled": bool})
    given = [(row, arch, "a.py", ()) for row, arch in zip(rows, ("cpu", "metal"), strict=True)]
    lines = "\n".join(report.section(op, report.joined(given))).split("\n")
    assert "Features, each in every line: scaled." in lines and "| target | dtypes | sizes | file | evidence |" in lines
    assert set(read(lines)) == {fact for one in given for fact in of(*one)}


def test_sizes_with_other_evidence_have_a_line_of_their_own():
    needs = {"N must be even": lambda c: True}
    rows = [Kernel("cuda", "bf16 f16", {"N": (n,), "M": (n,)}, "scaled") for n in (16, 32, 64, 128)]
    rows += [Kernel("mps", "f32", {"N": (4, 8)}, "", needs), Kernel("cpu", "f32", {}, "scaled biased")]
    op = Op("toy(Tensor x) -> Tensor out", {}, tuple(rows), features=dict.fromkeys(("scaled", "biased"), bool))
    seen = [("simulator",), ("on H", "simulator"), ("simulator",), (), (), ("on C",)]
    given = [(row, arch, "a.py", s) for row, s in zip(rows, seen, strict=True) for arch in row.archs]
    lines = "\n".join(report.section(op, report.joined(given))).split("\n")
    assert [line for line in lines if line.startswith("| ")][1:] == [
        "| cpu | f32 | any | all | - | a.py | on C |",
        "| metal | f32 | N 4, 8 | none | a | a.py | not yet |",
        *(
            f"| sm80, sm89, sm90, sm100, sm120 | bf16, f16 | N = M {each} | scaled | - | a.py | {where} |"
            for each, where in (
                ("16, 64", "simulator"),
                ("32", "on H; simulator"),
                ("128", "not yet"),
            )
        ),
    ]
    assert set(read(lines)) == {fact for one in given for fact in of(*one)}


def test_targets_share_a_line_where_nothing_else_differs():
    rows = [Kernel("sm80 sm89 sm120", "bf16", {"N": (16,)}), Kernel("sm90", "bf16", {"N": (16,)})]
    op = Op("toy(Tensor x) -> Tensor out", {}, tuple(rows))
    seen = {"sm80": ("sim",), "sm89": ("sim",), "sm90": ("on H", "sim")}
    given = [(row, arch, "a.py", seen.get(arch, ())) for row in rows for arch in row.archs]
    lines = "\n".join(report.section(op, report.joined(given))).split("\n")
    assert [line for line in lines if line.startswith("| sm")] == [
        "| sm80, sm89, sm90, sm120 | bf16 | N 16 | a.py | sm80 sim; sm89 sim; sm90 on H; sm90 sim; sm120 not yet |",
    ]
    assert set(read(lines)) == {fact for one in given for fact in of(*one)}
