"""The pages of docs/ops say what the table says, and so do ``describe`` and ``help``."""

from __future__ import annotations

import pydoc
import re
from pathlib import Path

import pytest
import torch

import torch_attnkit
from torch_attnkit import manual
from torch_attnkit.core import Kernel, Op
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import SIMULATED

ROOT = Path(__file__).parent.parent
ARCHS = ("cpu", *SIMULATED)


def test_pages_are_fresh():
    found = {f.name: f.read_text("utf-8") for f in (ROOT / "docs" / "ops").glob("*.md")}
    assert found == manual.pages(), "run: make support"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_page_has_all_that_the_table_has(op):
    text = " ".join(manual.page(op, []).split())
    for name in op.dims:
        assert f"| `{name}` |" in text
    for phrase in (*op.where, *(need for row in op.kernels for need in row.needs)):
        assert phrase in text
    for arch in ARCHS:
        limits_text = " ".join(manual.limits(op, arch))
        assert f"({arch})" in text or arch in ("cpu", "metal")
        for row in (r for r in op.kernels if arch in r.archs):
            assert set(re.findall(r"\w+", row.dtypes)) <= set(re.findall(r"\w+", limits_text))
            for sizes in row.dims.values():
                assert {str(n) for n in sizes} <= set(re.findall(r"\d+", limits_text))
    assert "Nothing is in `bench/baselines`" in text
    example = Path(op.module("op").__file__).with_name("example.py").read_text("utf-8")
    assert f"```python\n{example}```\n" in manual.page(op, [])


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_page_begins_with_the_name_and_the_signature(op):
    text = manual.page(op, [])
    assert f"\n# `{op.name}`\n" in text and f"\n```\n{manual.signature(op)}\n```\n" in text
    lines = manual.signature(op).split("\n")
    assert max(map(len, lines)) <= 80
    assert all(line.count("Tensor") <= 1 for line in lines[1:-1]), "an argument a line"
    assert " ".join(line.strip() for line in lines).replace("( ", "(").replace(", )", ")") == op.schema


def test_rows_that_differ_in_anything_but_sizes_are_told_apart():
    needs = {"N must be even": lambda c: c.dim["N"] % 2 == 0}
    rows = [Kernel("sm90", "bf16 f16", {"N": (n,), "M": (m,)}, "scaled") for n, m in ((16, 16), (32, 16))]
    rows += [Kernel("cuda", "bf16", {"N": (4, 8)}, "", needs), Kernel("mps", "f32", features="scaled biased")]
    op = Op("toy(Tensor x) -> Tensor out", {}, tuple(rows), features=dict.fromkeys(("scaled", "biased"), bool))
    assert manual.limits(op, "sm90") == [
        "bf16, f16; N = M 16; (N, M) (32, 16); without biased",
        "bf16; N 4, 8; without scaled, biased; N must be even",
    ]
    assert manual.limits(op, "sm100") == ["bf16; N 4, 8; without scaled, biased; N must be even"]
    assert manual.limits(op, "metal") == ["f32; any sizes"] and manual.limits(op, "cpu") == []


def test_shapes_that_depend_on_an_argument_are_found():
    assert manual.other_shapes(OPS["sdpa_decode"]) == ["`out` is (B, Hq, Dv) bf16 with q in f8e4m3"]
    assert "`scale` is (Ms, Ks) u8 or f8e4m3 with scale_layout '128x4'" in manual.other_shapes(OPS["nvfp4_dequantize"])
    assert "`swa_kv` is (Nw, Pw, D) with swa_block_table" in manual.other_shapes(OPS["sparse_fmha_with_swa"])


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_dtype_is_said_once(op):
    for one in (*manual.arguments(op), *manual.outputs(op)):
        limits_text = re.split(r" or ", one.what.partition(") ")[2].partition(",")[0].partition(";")[0])
        assert len(set(limits_text)) == len(limits_text), one


def test_the_layouts_of_other_libraries_are_warned_of():
    """Tensors as torch's SDPA takes them run wherever the sizes fit, and mean something else; transposed they agree."""
    for op in ("flash_attention", "sdpa_multi"):
        text = " ".join(torch_attnkit.describe(op).split())
        assert "torch's SDPA has" in text and "need ``.transpose(1, 2)``" in text.replace("needs", "need")
    q, k, v = torch.randn(3, 2, 4, 4, 16, dtype=torch.float64).unbind()  # (B, H, T, D)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    ours = lambda *tensors: torch.ops.attnkit.flash_attention(*tensors)[0]
    torch.testing.assert_close(ours(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2), want)
    assert not torch.allclose(ours(q, k, v), want, rtol=0.1)


def test_caches_of_e4m3_are_made_as_the_contract_says():
    """The line of sdpa_decode's contract, run: decode reads what it makes, and not the rows of kv_cache_write."""
    (line,) = re.findall(r"``(\(k / .*?\))``", OPS["sdpa_decode"].module("op").__doc__)
    k, v = torch.randn(2, 1, 2, 8, 64).unbind()  # (B, Hkv, T, D)
    scales = [t.abs().amax((2, 3)) / 448 for t in (k, v)]
    coded = [eval(line, {"torch": torch, "k": t, "k_scale": s}) for t, s in zip((k, v), scales, strict=True)]
    held = [c.float() * s[..., None, None] for c, s in zip(coded, scales, strict=True)]
    q, n = torch.randn(1, 4, 64), torch.tensor([8], dtype=torch.int32)
    got = torch.ops.attnkit.sdpa_decode(q, *coded, n, k_scale=scales[0], v_scale=scales[1])[0]
    torch.testing.assert_close(got, torch.ops.attnkit.sdpa_decode(q, *held, n)[0])
    half_steps = 2.0**-4 * k.abs() + 2.0**-10 * scales[0][..., None, None]  # of 3 bits, and of subnormal numbers
    assert ((held[0] - k).abs() <= half_steps).all()
    rows = torch.zeros(1, 2, 8, 584, dtype=torch.uint8)
    with pytest.raises(TypeError, match="k_cache is u8, accepted: "):
        torch.ops.attnkit.sdpa_decode(q, rows, rows, n)


def test_speed_is_what_the_baselines_say():
    line = dict(case="no-such-case", dtype="bfloat16", us=12.34, rate="1.00 TB/s", fraction=0.25, peers={}, missing={})
    other = line | dict(case="1x1024", us=None, peers={"A": {"ratio": 1.5}, "B": {"us": 1}}, run={"commit": "def+"})
    record = dict(
        device="A GPU", driver="1\n1", date="2026-01-01", commit="abc", versions={"torch": "9"}, lines=[line, other]
    )
    text = manual.page(OPS["sdpa_decode"], [{"sdpa_decode": record}])
    assert "A GPU, driver 1, 2026-01-01: torch 9." in text
    assert "| no-such-case | a case that the bench has no more | bf16 | 12.3 | 1.00 TB/s | 0.25 | - | `abc` |" in text
    assert "| 1x1024 | B 1, Hq 32, Hkv 8, S 1024, D 128, Dv 128 | bf16 | wrong |" in text
    assert "| A 1.50 | `def+` |" in text


@pytest.mark.parametrize("op", OPS)
def test_describe_fits_80_columns_and_help_has_the_contract(op):
    text = torch_attnkit.describe(op)
    assert max(map(len, text.splitlines())) <= 80
    for name in OPS[op].argnames:
        assert f"\n  {name}: " in text
    packet = getattr(torch.ops.attnkit, op)
    assert packet.__doc__.startswith(f"{op}: ") and OPS[op].schema in packet.__doc__
    assert packet.__doc__.splitlines()[0] in pydoc.render_doc(packet)


def test_describe_refuses_unknown_ops():
    with pytest.raises(ValueError, match="describe: no op 'nonsense'; there are causal_conv1d, flash_attention"):
        torch_attnkit.describe("nonsense")


def test_outside_a_checkout_there_are_no_pages(monkeypatch, tmp_path):
    monkeypatch.setattr(manual.paths, "package", lambda: tmp_path / "torch_attnkit")
    with pytest.raises(FileNotFoundError, match="accepted: a checkout"):
        manual.pages()


def test_links_of_the_documentation_lead_somewhere():
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).resolve().exists(), f"{page.name}: {target}"
    assert len(pages) > len(OPS)


def test_the_first_page_leads_to_every_family_and_example():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in (ROOT / "docs" / "kernels").glob("*.md"):
        assert f"(kernels/{page.name})" in index
    for script in (ROOT / "examples").glob("*.py"):
        assert f"`{script.name}`" in index
