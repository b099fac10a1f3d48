"""An op's contract in words: ``describe``, and the pages of docs/ops, which ``make support`` writes from the table.

Everything comes from its one home: what an op does from the docstring of its ``op.py``, shapes, dtypes, limits and
refusals from the table, the example from its ``example.py``, speed from ``bench/baselines``.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from torch_attnkit import paths
from torch_attnkit.arguments import CONTENTS, Argument, arguments, dtypes, outputs, shape
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Call, Kernel, Op
from torch_attnkit.core.spec import DTYPES, MODEL_DTYPES, short
from torch_attnkit.report import ARCHS, sizes

_WIDTH = 80
_MODEL = ", ".join(map(short, MODEL_DTYPES))
_GENERATED = "<!-- Generated from the table: python -m torch_attnkit docs --write docs/ops -->\n"
_INDEX = f"""\
{_GENERATED}
# The ops

What each of them computes is its contract; `torch_attnkit/ops/<op>/reference.py` is the definition in plain PyTorch.
Every op runs on the CPU. On a GPU a kernel runs or the call is refused, with the reason; `SUPPORT.md` says which
kernels have been seen right, and on what. The same in a terminal:

    python -m torch_attnkit describe sdpa_decode
    python -m torch_attnkit explain sdpa_decode B=1 Hq=32 Hkv=8 S=1024 D=128 Dv=128 --target sm90

"""
_LEGEND = f"""\
T is the dtype of the model, one of {_MODEL}. The same letter is the same size wherever it stands;
`K/2` is a size that was divided, `B+1` one that was increased, `...` any number of batch axes.
"""
_EXAMPLE = "<example>"  # its place, while a page is put together
_RULES = "A call raises `ValueError` unless these hold:\n"
_REFUSALS = """
It raises `TypeError` for a dtype that is not listed above and `ValueError` for shapes that do not fit each other. On a
GPU it raises `UnsupportedError`, with the reason of every row, where no row takes it. There is no backward: a gradient
that would have to flow through the op raises.
"""
_MEASURED = """\
Medians of calls in a CUDA graph, inputs colder than the L2; each case was compared with its reference before it was
timed. *Of the limit* is the part of what a copy moves, or a large bf16 product computes, in the same run. A peer's
number is its time in units of ours. *Commit* is what ran, with a `+` where it had changes that were not committed:
kernels may have changed since.
"""


def other_shapes(op: Op) -> list[str]:
    """Tensors that have other axes or dtypes with some argument, found by asking ``layouts`` with one at a time."""
    plain = {n: op.choices[n][0] if n in op.choices else op.defaults.get(n) for n in op.argnames}
    changes: list[tuple[str, dict[str, Any]]]
    changes = [(f"{n} {value!r}", {n: value}) for n, values in op.choices.items() for value in values]
    changes += [(n, {n: torch.empty(0)}) for n in op.tensors if n not in (*op.layouts, *op.mutated)]

    def call(changed: dict[str, Any], dtype: torch.dtype = torch.float32) -> Call:
        return Call(op.name, {}, SimpleNamespace(**plain | changed), dtype, (), torch.device("cpu"))

    calls = [(phrases, call(changed)) for phrases, changed in changes]
    calls.append(("q in f8e4m3", call({}, DTYPES["f8e4m3"])))
    found: dict[str, list[str]] = {}
    for name, layout in op.layouts.items():
        usual = layout(call({})) or op.dims[name]
        for phrases, asked in calls:
            if (text := layout(asked)) and text != usual:
                cast = f" {dtypes(text)}" if ":" in text else ""
                found.setdefault(f"`{name}` is {shape(text)}{cast}", []).append(phrases)
    return [f"{what} with {' or '.join(phrases)}" for what, phrases in found.items()]


def limits(op: Op, arch: str) -> list[str]:
    """What the kernels of an architecture take, a sentence for rows that differ in sizes alone."""
    alike: dict[tuple[Any, ...], list[Kernel]] = {}
    for row in (r for r in op.kernels if arch in r.archs):
        alike.setdefault((row.dtypes, tuple(row.dims), row.features, tuple(row.needs)), []).append(row)
    found = []
    for rows in alike.values():
        row = rows[0]
        without = [f for f in op.features if f not in row.features.split()]
        phrases = [row.dtypes.replace(" ", ", "), sizes(rows)]
        phrases += [f"without {', '.join(without)}"] if without else []
        phrases += list(row.needs)
        found.append("; ".join(phrases))
    return found


def _contract(op: Op) -> str:
    """The docstring of op.py, its source a paragraph of its own."""
    return (op.module("op").__doc__ or "").strip().replace("\nSource:", "\n\nSource:")


def _runs(op: Op, arch: str) -> list[str]:
    """``limits``, and what happens to a call that no row takes."""
    if arch == "cpu":
        return [*limits(op, arch), "everything else: the reference" if limits(op, arch) else "the reference"]
    return limits(op, arch) or ["no kernel: a call raises UnsupportedError"]


def _by_targets(op: Op) -> Iterator[tuple[str, list[str]]]:
    """Names of the architectures that run the same of an op, and what that is."""
    same: dict[tuple[str, ...], list[str]] = {}
    for arch, name in ARCHS.items():
        same.setdefault(tuple(_runs(op, arch)), []).append(name)
    yield from (("; ".join(names), list(lines)) for lines, names in same.items())


def _block(head: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield "\n" + textwrap.fill(head, _WIDTH)
        for line in lines:
            yield from textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="      ")


def _described(head: str, found: list[Argument]) -> Iterator[str]:
    """Arguments or outputs, a sentence under each."""
    for i, a in enumerate(found):
        default = f" (default {a.default})" if a.default else ""
        lines = list(_block(head, [f"{a.name}: {a.what}{default}"]))
        yield from lines[i > 0 :]
        yield from textwrap.wrap(a.meaning, _WIDTH, initial_indent="      ", subsequent_indent="      ")


def describe(op: str) -> str:
    """What an op computes, its arguments, what each architecture's kernels take, and an example, in 80 columns.

    Raises ValueError for a name that no op has.
    """
    if op not in OPS:
        raise ValueError(f"describe: no op {op!r}; there are {', '.join(OPS)}")
    record = OPS[op]
    lines = [textwrap.fill(part, _WIDTH) for part in re.split(r"\n\s*\n", _contract(record))]
    parts = ["\n\n".join(lines)]
    parts += _described("Arguments", arguments(record))
    parts += _described("Returns", outputs(record))
    parts += _block("Other shapes", [line.replace("`", "") for line in other_shapes(record)])
    parts += _block("Axes", [f"{axis}: {phrases}" for axis, phrases in record.axes.items()])
    parts += ["", textwrap.fill(CONTENTS, _WIDTH)]
    parts += _block("A call is refused unless", list(record.where))
    for names, lines in _by_targets(record):
        parts += _block(names, lines)
    parts += _block("Example", [f"torch_attnkit/ops/{op}/example.py"])
    return "\n".join(parts) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def _families(op: Op) -> list[str]:
    """The kernel families that the op's adapters ask and that have a page."""
    folder, pages = paths.package() / "ops" / op.name, paths.package().parent / "docs" / "kernels"
    texts = (f.read_text("utf-8") for name in ("problem", "cuda", "mps") for f in folder.glob(f"{name}.py"))
    named = {family for text in texts for family in re.findall(r"torch_attnkit\.kernels\.(\w+)", text)}
    named |= {family for family in re.findall(r"torch_attnkit\.kernels\.(\w+)", (folder / "op.py").read_text("utf-8"))}
    return sorted(family for family in named if (pages / f"{family}.md").exists())


def _gradients(op: Op) -> str:
    if op.backward:
        return f"Gradients flow to its tensors through [`{op.backward}`]({op.backward}.md)."
    return "There is no backward: a gradient that would have to flow through the op raises."


def _shared(op: Op) -> Iterator[str]:
    """Along which axes processes may share a call."""
    if op.whole:
        yield f"Nothing can be cut: {op.whole}."
        return
    yield "[DTensors](../several_gpus.md) may be cut, in equal parts that the op takes, along\n"
    for shards in op.shards:
        outs = [name for name in shards.sums.split() if name in op.outnames]
        sums = f"; {', '.join(f'`{name}`' for name in outs)} then holds sums" if outs else ""
        needs = f": with {', '.join(shards.needs)}" if shards.needs else ""
        yield f"- `{shards.axes}`{needs}{sums}"


def _case(op: Op, name: str) -> str:
    dims = op.module("cases").BENCH.get(name)
    return ", ".join(f"{k} {v}" for k, v in dims.items()) if dims else "a case that the bench has no more"


def _speed(op: Op, baselines: list[dict[str, Any]]) -> Iterator[str]:
    for ops in baselines:
        if (record := ops.get(op.name)) is None:
            continue
        versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items() if k != "torch_attnkit")
        driver = record["driver"].splitlines()[0]
        yield f"{record['device']}, driver {driver}, {record['date']}: {versions}.\n"
        yield _MEASURED
        yield _row("case", "sizes", "dtype", "us", "rate", "of the limit", "peers", "commit")
        yield "|---" * 8 + "|"
        for line in record["lines"]:
            peers = ", ".join(f"{name} {p['ratio']:.2f}" for name, p in line["peers"].items() if p.get("ratio"))
            commit = line.get("run", record).get("commit", record["commit"])
            yield _row(
                line["case"], _case(op, line["case"]), short(getattr(torch, line["dtype"])),
                f"{line['us']:.1f}" if line["us"] else "wrong",
                line["rate"], f"{line['fraction']:.2f}", peers or "-", f"`{commit}`",
            )  # fmt: skip
        yield f"\nTo repeat it: `python -m bench {op.name} --peers`."


def signature(op: Op) -> str:
    """The schema; where it is long, an argument a line."""
    if len(op.schema) <= _WIDTH:
        return op.schema
    head, _, rest = op.schema.partition("(")
    given, _, returned = rest.rpartition(") -> ")
    return "\n".join([f"{head}(", *(f"    {one}," for one in given.split(", ")), f") -> {returned}"])


def page(op: Op, baselines: list[dict[str, Any]]) -> str:
    """The Markdown of an op's page."""
    contract = _contract(op).removeprefix(f"{op.name}: ")
    parts = [_GENERATED, f"# `{op.name}`\n", contract[0].upper() + contract[1:] + "\n"]
    parts += [f"```\n{signature(op)}\n```\n", "## Arguments\n", _LEGEND]
    parts += [_row("argument", "is", "default", "meaning"), "|---" * 4 + "|"]
    for a in arguments(op):
        parts.append(_row(f"`{a.name}`", a.what, f"`{a.default}`" if a.default else "must be given", a.meaning))
    if op.outnames:
        parts += ["", _row("output", "is", "meaning"), "|---" * 3 + "|"]
        parts += [_row(f"`{a.name}`", a.what, a.meaning) for a in outputs(op)]
    parts += ["", *(f"- {line}" for line in other_shapes(op)), ""]
    parts += [_row("axis", "counts"), "|---|---|", *(_row(f"`{axis}`", phrases) for axis, phrases in op.axes.items())]
    parts += ["", CONTENTS]
    parts += ["\n## Example\n", f"```python\n{_EXAMPLE}```\n", "## What runs where\n"]
    for names, lines in _by_targets(op):
        parts += [f"**{names}**\n", *(f"- {line}" for line in lines), ""]
    parts += ["A word behind *without* is a feature of the call that the kernel refuses. `SUPPORT.md` says of each row"]
    parts += ["on what evidence it stands.\n"]
    parts += [f"How it is done: {', '.join(f'[{f}](../kernels/{f}.md)' for f in _families(op))}.\n"]
    parts += [
        "## Refusals\n",
        "A call raises `TypeError` for a dtype that is not listed above, `ValueError` for shapes",
    ]
    parts += ["that do not fit each other, and unless these hold:\n", *(f"- {rule}" for rule in op.where)]
    parts += ["\nOn a GPU it raises `UnsupportedError`, with the reason of every row, where no row takes it."]
    parts += [_gradients(op) + "\n", "## Several processes\n", *_shared(op), ""]
    parts += ["## Speed\n", *(list(_speed(op, baselines)) or ["Nothing is in `bench/baselines`."])]
    # The example keeps its own empty lines.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).replace(_EXAMPLE, _example(op)) + "\n"


def _example(op: Op) -> str:
    return (paths.package() / "ops" / op.name / "example.py").read_text("utf-8")


def pages() -> dict[str, str]:
    """File name to text of docs/ops. Raises FileNotFoundError outside a checkout, where there are no baselines."""
    folder = paths.package().parent / "bench" / "baselines"
    if not folder.is_dir():
        raise FileNotFoundError(f"docs: there is no {folder}; accepted: a checkout, which has the baselines")
    baselines = [json.loads(file.read_text("utf-8"))["ops"] for file in sorted(folder.glob("*.json"))]
    found = {f"{name}.md": page(op, baselines) for name, op in OPS.items()}
    first = {name: _contract(op).split("\n")[0].removeprefix(f"{name}: ") for name, op in OPS.items()}
    index = "\n".join(["| op | |", "|---|---|", *(f"| [`{n}`]({n}.md) | {phrases} |" for n, phrases in first.items())])
    return found | {"index.md": _INDEX + index + "\n"}
