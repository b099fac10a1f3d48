"""GPUs to targets, and the rows that several targets share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import Kernel, UnsupportedError
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import NVIDIA, WHERE, Target, target_of
from torch_attnkit.cuda.compile import GPU_ARCH
from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.report import ARCHS

CARDS = {
    (8, 0): "sm80",  # A100
    (8, 6): "sm80",  # RTX 30, A10
    (8, 9): "sm89",  # RTX 40, L40S
    (9, 0): "sm90",
    (10, 0): "sm100",
    (10, 3): "sm100",
    (12, 0): "sm120",  # RTX 50, RTX PRO
    (12, 1): "sm120",  # DGX Spark
}


@pytest.fixture
def card(monkeypatch):
    """The one GPU, of a capability that is given."""

    def named(capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
        return torch.device("cuda", 0)

    return named


@pytest.mark.parametrize(("capability", "arch"), CARDS.items(), ids=str)
def test_a_capability_has_a_target(card, capability, arch):
    assert target_of(card(capability)) == Target(arch)


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (11, 0), (12, 2)], ids=str)
def test_another_is_refused_with_those_that_there_are(card, capability):
    with pytest.raises(UnsupportedError) as refused:
        target_of(card(capability))
    listed = ", ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in CARDS.items())
    found = ".".join(map(str, capability))
    assert str(refused.value) == f"A Card has compute capability {found}; there are kernels for {listed}"


def test_every_target_is_known_everywhere():
    assert set(CARDS.values()) == set(NVIDIA) == GPU_ARCH.keys() == LIMITS.keys()
    assert list(ARCHS) == ["cpu", "metal", *NVIDIA]
    assert WHERE["cuda"] == NVIDIA


def test_a_row_may_be_for_several_targets():
    row = Kernel("sm80 sm89 sm120", "bf16")
    assert row.archs == ("sm80", "sm89", "sm120")
    assert Kernel("cuda", "bf16").archs == NVIDIA and Kernel("mps sm90", "bf16").archs == ("metal", "sm90")
    with pytest.raises(KeyError):
        _ = Kernel("sm75", "bf16").archs


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm120"])
def test_explain_says_what_runs_and_what_does_not(arch):
    q, cache = torch.empty(1, 8, 128, dtype=torch.bfloat16), torch.empty(1, 2, 64, 128, dtype=torch.bfloat16)
    text = torch_attnkit.explain("sdpa_decode", q, cache, cache, torch.tensor([5], dtype=torch.int32), target=arch)
    assert text.splitlines()[3:5] and "runs     torch_attnkit/kernels/decode/launch.py on " + arch in text
    lacking = [name for name, op in OPS.items() if not any(arch in row.archs for row in op.kernels)]
    assert all(any("sm90" in row.archs for row in OPS[name].kernels) for name in lacking)


def test_the_page_of_gpus_says_what_the_table_says():
    """docs/gpus.md: capabilities, the ops without kernels, and the limits of each target."""
    text = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text("utf-8")
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.split("\n") if line.startswith("| ")]
    named = {row[2].split("`")[1]: set(re.findall(r"\d+\.\d", row[1])) for row in cells if re.search(r"\d\.\d", row[1])}
    expected: dict[str, set[str]] = {}
    for (major, minor), arch in CARDS.items():
        expected.setdefault(arch, set()).add(f"{major}.{minor}")
    assert {arch: found for arch, found in named.items() if arch in NVIDIA} == expected

    lists = re.findall(r"^- (.*?)(?=^-|^$)", text.partition("## What is refused")[2], re.M | re.S)
    lacking = {}
    for one in lists:
        words = re.findall(r"`(\w+)`", one)
        archs = [word for word in words if word in NVIDIA]
        lacking |= dict.fromkeys(archs, {word for word in words if word not in NVIDIA})
    for arch in NVIDIA:
        without = {name for name, op in OPS.items() if not any(arch in row.archs for row in op.kernels)}
        assert lacking.get(arch, set()) == without, f"docs/gpus.md: {arch}"

    header = next(row for row in cells if row[0] == "" and "`sm80`" in row[1])
    limits = {row[0]: row[1:] for row in cells[cells.index(header) + 1 :]}
    for column, head in enumerate(header[1:]):
        for arch in re.findall(r"`(\w+)`", head):
            found = {name: row[column] for name, row in limits.items()}
            assert found["shared memory of a CTA, KB"] == str(LIMITS[arch].shared >> 10)
            assert found["clusters, TMA, mbarriers that count bytes"] == ("yes" if LIMITS[arch].clusters else "no")
            assert found["programmatic dependent launch"] == ("yes" if LIMITS[arch].pdl else "no")
            assert (found["E4M3 conversions"] == "instructions") == LIMITS[arch].e4m3
