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


@pytest.mark.parametrize("op", OPS)
def test_every_source_states_its_grid(op: str):
    head = paths.metal_source(op).read_text().split("#include")[0]
    assert "rid" in head and "//" in head


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
