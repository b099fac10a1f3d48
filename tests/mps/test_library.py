"""Metal sources as text: includes, specialisation, what they declare."""

from __future__ import annotations

import re

import pytest
import torch

from torch_attnkit import paths
from torch_attnkit.mps import library

OPS = sorted(p.stem for p in (paths.csrc() / "metal").glob("*.metal"))
HEADERS = sorted(p.name for p in (paths.metal_include() / "attnkit").glob("*.h"))


def test_there_are_sources():
    assert "sdpa_decode" in OPS and "fragment.h" in HEADERS


@pytest.mark.parametrize("op", OPS)
def test_every_include_of_ours_is_pasted_in(op: str):
    text = library.source(op, {})
    assert "attnkit/" not in "".join(re.findall(r"^\s*#\s*include.*$", text, re.M))
    assert "#include <metal_stdlib>" in text
    assert text.isascii()


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_declares_its_buffers_in_order(op: str):
    declared = library.slots(library.source(op, {}))
    assert declared and all(0 < n <= 31 for n in declared.values())


STATED = re.compile(r"\bgrid(?: of \w+)?: (?:[^.]|\.\w)*?\b(?:threads?|threadgroups?|simdgroups?)\b", re.IGNORECASE)


def states_grid(text: str) -> bool:
    """Whether the comments of a source's head say of what its grid is made, or those of every file that they name."""
    head = " ".join(line.strip(" /") for line in text.splitlines() if line.startswith("//"))
    if STATED.search(head):
        return True
    near = re.findall(r"[^.;]*(?:\.\w[^.;]*)*", head)  # sentences: a point within a name ends none
    named = {name for part in near if "rid" in part for name in re.findall(r"[\w/]+\.(?:h|metal)\b", part)}
    if "each header states its grid" in head.lower():
        named |= set(re.findall(r"attnkit/\w+\.h", head))
    files = [paths.metal_include() / n if n.endswith(".h") else paths.csrc() / "metal" / n for n in named]
    return bool(files) and all(states_grid(file.read_text()) for file in files)


@pytest.mark.parametrize("op", OPS)
def test_every_source_states_its_grid(op: str):
    head = paths.metal_source(op).read_text().split("#include")[0]
    assert states_grid(head)
    without = re.sub(r"\bgrids?\b", "shape", head, flags=re.IGNORECASE)
    assert not states_grid(without), "the statement is what is found"


def test_a_word_beside_grid_is_no_statement():
    assert not states_grid("// Bound by memory.\n// uint i [[thread_position_in_grid]]: a thread has an element.\n")
    assert not states_grid("// The grid is large.\n// See attnkit/vectors.h for the grid.\n")
    assert states_grid("// Grid: ceil(n / 32) threadgroups along x.\n")
    assert states_grid("// attnkit/topk.h states the grid.\n")


@pytest.mark.parametrize("name", HEADERS)
def test_every_header_is_used(name: str):
    texts = [p.read_text() for p in (paths.csrc() / "metal").rglob("*") if p.suffix in (".metal", ".h")]
    assert any(f'"attnkit/{name}"' in t for t in texts)


def test_a_header_is_pasted_once():
    one = library.inline('#include "attnkit/vectors.h"\n')
    assert "ATTNKIT_UNROLL" in one
    assert library.inline('#include "attnkit/vectors.h"\n#include <attnkit/vectors.h>\n').strip() == one.strip()


def test_other_headers_stay():
    assert library.inline("#include <metal_stdlib>\n") == "#include <metal_stdlib>\n"


def test_a_missing_header_is_named():
    with pytest.raises(FileNotFoundError, match=r"attnkit/nothing\.h"):
        library.inline('#include "attnkit/nothing.h"\n')


def test_defines_come_first_and_are_words_of_metal():
    text = library.source("merge_partials", dict(IN_TYPE=torch.bfloat16, OUT_TYPE=torch.float32, WIDTH=4, X=True))
    assert text.startswith("#define IN_TYPE bfloat\n#define OUT_TYPE float\n#define WIDTH 4\n#define X 1\n")


def test_buffers_out_of_order_are_refused():
    text = "kernel void f(device float* a [[buffer(0)]], device float* b [[buffer(2)]]) {\n}\n"
    with pytest.raises(ValueError, match=r"f: buffers \[0, 2\], accepted: 0, 1, 2"):
        library.slots(text)
