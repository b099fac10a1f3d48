"""Two bench results side by side: ``python -m bench.compare OLD.json NEW.json``.

Takes files of ``--json`` and baselines. A case counts as slower or faster beyond 3 %, which repeats of one version
reach. Exits with 1 if a case of both became slower.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_NOISE = 0.03


def lines(file: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The lines of a result or a baseline by (op, case, dtype)."""
    read = json.loads(file.read_text())
    records = read["ops"].values() if "ops" in read else [read]
    return {(x["op"], x["case"], x["dtype"]): x for record in records for x in record["lines"]}


def main(old_file: str, new_file: str) -> int:
    old, new = lines(Path(old_file)), lines(Path(new_file))
    table = Table("op", "case", "dtype", "old us", "new us", "old / new", "")
    slower = 0
    for key in sorted(old.keys() & new.keys()):
        a, b = (side[key].get("us") for side in (old, new))
        if a is None or b is None:
            table.add_row(*key, *(f"{x:.2f}" if x else "wrong" for x in (a, b)), "-", "")
            slower += b is None
            continue
        word = "faster" if b < a * (1 - _NOISE) else "SLOWER" if b > a * (1 + _NOISE) else ""
        slower += word == "SLOWER"
        table.add_row(*key, f"{a:.2f}", f"{b:.2f}", f"{a / b:.3f}", word)
    Console().print(table)
    for side, keys in (("old", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        print("\n".join(f"only in {side}: {' '.join(key)}" for key in sorted(keys)))
    return 1 if slower else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
