"""Tables of current figures on the kernels' pages: ``python -m bench.pages [--check]``.

A page of docs/kernels marks where they stand::

    <!-- baselines: sdpa_decode sdpa_decode_paged -->
    <!-- /baselines -->

What is between is rewritten from bench/baselines/nvidia-h200.json, a table an op. ``--check`` writes nothing and exits
with 1 if a table is old.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "bench" / "baselines" / "nvidia-h200.json"
PAGES = ROOT / "docs" / "kernels"
# Rows of a table. Of an op with more cases the table has so many, evenly spaced in the order of the bench.
MAX_ROWS = 16
_MARKED = re.compile(r"<!-- baselines: ([^\n]*?) -->\n(.*?)<!-- /baselines -->", re.S)
_DTYPES = {"bfloat16": "", "float16": " f16", "float32": " f32", "float8_e4m3fn": " e4m3"}


def rewritten(page: str, ops: dict[str, Any]) -> str:
    """The page with every table as ``ops`` of a baseline has it now."""
    if page.count("<!-- baselines:") != page.count("<!-- /baselines -->"):
        raise ValueError("a <!-- baselines: OP --> has no <!-- /baselines -->, or the other way round")

    def tables(marked: re.Match[str]) -> str:
        names = marked[1].split()
        for name in names:
            if name not in ops:
                raise ValueError(f"no baseline of {name!r}; there are {', '.join(ops)}")
        body = "\n".join(table(name, ops[name]) for name in names)
        return f"<!-- baselines: {marked[1]} -->\n\n{body}\n<!-- /baselines -->"

    return _MARKED.sub(tables, page)


def table(op: str, record: dict[str, Any]) -> str:
    """One op's lines: a caption that says how they were chosen and of when they are, then the rows."""
    lines = [line for line in record["lines"] if "us" in line]
    kept = spread(lines, MAX_ROWS)
    of = f"{len(kept)} of {len(lines)} cases, evenly spaced" if len(kept) < len(lines) else f"all {len(lines)} cases"
    dates = sorted({line.get("run", {}).get("date", record["date"]) for line in kept})
    head = f"`{op}` on an {record['device']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {of}:"
    rows = ["|case|us|rate|best peer / ours|", "|---|---|---|---|"]
    for line in kept:
        case = line["case"] + _DTYPES[line["dtype"]]
        rows.append(f"|{case}|{line['us']:.1f}|{line['rate']}|{peer(line)}|")
    return "\n".join([head, "", *rows, ""])


def spread(lines: list[Any], most: int) -> list[Any]:
    """At most so many of the lines, the first and the last among them, by position alone."""
    if len(lines) <= most:
        return lines
    return [lines[round(i * (len(lines) - 1) / (most - 1))] for i in range(most)]


def peer(line: dict[str, Any]) -> str:
    """The fastest peer's time over ours, and its name."""
    ratio, name = min(((p["ratio"], n) for n, p in line["peers"].items() if "ratio" in p), default=(0.0, ""))
    return f"{ratio:.2f} {name}" if name else "-"


def main(*flags: str) -> int:
    if set(flags) - {"--check"}:
        sys.exit(__doc__)
    ops = json.loads(BASELINE.read_text())["ops"]
    old = []
    for file in sorted(PAGES.glob("*.md")):
        page = file.read_text("utf-8")
        try:
            now = rewritten(page, ops)
        except ValueError as error:
            raise ValueError(f"{file.relative_to(ROOT)}: {error}") from error
        if now != page:
            old.append(file)
            if not flags:
                file.write_text(now, "utf-8")
    for file in old:
        print(f"{file.relative_to(ROOT)}: {'old' if flags else 'written'}")
    return 1 if flags and old else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
