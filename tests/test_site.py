"""The site's navigation has every op under its own name, and every page but those of docs/lab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bench.site import on_page_markdown
from torch_attnkit.core.dispatch import OPS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def pages(nav: list[Any]) -> Iterator[tuple[str | None, str]]:
    """Title and path of every page, however deep it stands."""
    for entry in nav:
        ((title, below),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(below, str):
            yield title, below
        else:
            yield from pages(below)


def missing(nav: list[Any]) -> list[str]:
    """The ops that the navigation does not have under their own names."""
    found = list(pages(nav))
    return [name for name in OPS if (f"<code>{name}</code>", f"ops/{name}.md") not in found]


@pytest.fixture(scope="module")
def nav() -> list[Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]


def test_every_op_is_in_the_navigation_under_its_own_name(nav):
    assert missing(nav) == [], "a line in mkdocs.yml is missing"


def test_an_op_without_a_line_is_found():
    name, *others = OPS
    assert missing([{"Ops": [{f"<code>{n}</code>": f"ops/{n}.md"} for n in others]}]) == [name]
    assert missing([{n.replace("_", " "): f"ops/{n}.md"} for n in OPS]) == list(OPS)


def test_every_page_is_in_the_navigation_once(nav):
    found = [page for _, page in pages(nav)]
    existing = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(found) == sorted(page for page in existing if not page.startswith("lab/"))


def test_links_above_the_pages_are_texts_on_the_site():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="kernels/decode.md"))
    text = "[`plan.py`](../../torch_attnkit/kernels/decode/plan.py), [speed](../speed.md), [a figure](../images/a.svg)"
    assert on_page_markdown(text, page=page) == "`plan.py`, [speed](../speed.md), [a figure](../images/a.svg)"
