"""The demo's text: sentences of this project's own documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def _documentation() -> Iterator[str]:
    """The repository's Markdown files if they are there, then the docstrings of the package."""
    for name in ("README.md", "CONTRIBUTING.md", "ROADMAP.md", "CHANGELOG.md"):
        if (file := PACKAGE.parent / name).is_file():
            yield file.read_text()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                yield text


def sentences(count: int) -> list[str]:
    """``count`` distinct sentences of seven words or more."""
    found: dict[str, str] = {}
    for text in _documentation():
        text = re.sub(r"```[\s\S]*?```|^\|.*$|^#+ .*$|^ {4,}.*$", "\n\n", text, flags=re.MULTILINE)  # code, tables
        for paragraph in re.split(r"\n\s*\n|^\s*[-*] |^\d+\. ", text, flags=re.MULTILINE):
            plain = re.sub(r"[`*]|\s+", lambda m: " " if m[0].isspace() else "", paragraph).strip()
            for sentence in re.split(r"(?<=[.;])\s+", plain):
                if 7 <= len(sentence.split()) <= 60:
                    found.setdefault(sentence.lower(), sentence)
    return list(found.values())[:count]
