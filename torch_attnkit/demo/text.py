"""The demo's text: sentences of this project's own documentation."""

from __future__ import annotations

import re
from pathlib import Path

from torch_attnkit.core.dispatch import OPS


def sentences(count: int) -> list[str]:
    """``count`` distinct sentences: of the repository's Markdown files if they are there, and of the ops' contracts."""
    root = Path(__file__).parent.parent.parent
    names = ("README.md", "CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md")
    texts = [(root / name).read_text() for name in names if (root / name).is_file()]
    texts += [op.module("op").__doc__ or "" for op in OPS.values()]
    found = []
    for text in texts:
        text = re.sub(r"```.*?```|^\|.*$|^#+ .*$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)  # code, tables, titles
        for paragraph in re.split(r"\n\s*\n|^\s*[-*] |^\d+\. ", text, flags=re.MULTILINE):
            plain = re.sub(r"[`*]|\s+", lambda m: " " if m[0].isspace() else "", paragraph).strip()
            found += [s for s in re.split(r"(?<=[.:;])\s+", plain) if 4 <= len(s.split()) <= 60]
    return list(dict.fromkeys(found))[:count]
