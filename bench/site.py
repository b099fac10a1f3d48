"""A hook of mkdocs: a page's links to files outside of docs/ become their texts, for the site has no such files."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!images/|lab/|kernels/|ops/)[\w./-]*\.\w+(?:#[\w-]+)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text, where a link goes above docs/ without it."""
    above = "../" * (page.file.src_uri.count("/") + 1)
    return _OUTSIDE.sub(lambda m: m[1] if m[0].startswith(f"[{m[1]}]({above}") else m[0], markdown)
