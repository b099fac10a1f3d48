"""The sm90 rows in the simulator against what the same rows gave on an H200 (see vectors.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from torch_attnkit.core.dispatch import OPS

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
_spec = importlib.util.spec_from_file_location("vectors", Path(__file__).with_name("vectors.py"))
vectors = importlib.util.module_from_spec(_spec)
sys.modules["vectors"] = vectors
_spec.loader.exec_module(vectors)

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore")]
RECORDED = torch.load(vectors.FILE, weights_only=True)["cases"] if vectors.FILE.exists() else {}
CALLS = {name: vectors.Call(**recorded["call"]) for name, recorded in RECORDED.items()}


def steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable numbers apart, element by element; NaN is nowhere near anything but NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    signed = lambda t: t.view(bits).long()
    ordered = lambda t: torch.where(signed(t) < 0, torch.iinfo(bits).min - signed(t), signed(t))
    apart = (ordered(a) - ordered(b)).abs()
    return torch.where(a.isnan() | b.isnan(), torch.where(a.isnan() & b.isnan(), 0, 1 << 40), apart)


def narrow(row) -> bool:
    return row.launcher is not None and row.launcher.narrow_sums


def test_every_row_is_recorded():
    giving = {name: op for name, op in OPS.items() if not op.mutated}  # others return nothing
    rows = {(name, i) for name, op in giving.items() for i, row in enumerate(op.kernels) if "sm90" in row.archs}
    # Prefill over E4M3 waits for its recording, by queries of 8 bits and of 16: python tests/sim/ptx/vectors.py --new
    rows -= {(name, i) for name, op in giving.items() for i, row in enumerate(op.kernels) if narrow(row)}
    paged = OPS["flash_attention_paged"].kernels
    rows -= {("flash_attention_paged", i) for i, row in enumerate(paged) if row.dims.get("bits") == (8,)}
    rows -= {("linear_decode", 0)}  # likewise
    assert {(call.op, vectors.row_of(call)) for call in CALLS.values()} == rows, (
        "record again on an H200: python tests/sim/ptx/vectors.py"
    )
    assert vectors.FILE.stat().st_size < 350_000


@pytest.mark.sample(63)
@pytest.mark.parametrize("name", RECORDED)
def test_the_simulator_gives_what_the_gpu_gave(name):
    """Without tensor cores the order of every sum is fixed: in half precision the same number or its neighbour, and in
    float32, which hides nothing, the error that the PTX ISA allows ex2.approx. Scores of 8-bit and 4-bit keys have all
    bits, since wgmma's narrow sums are known. Otherwise the oracle's tolerance."""
    call, recorded = CALLS[name], RECORDED[name]
    assert vectors.digest(call) == recorded["inputs"], "other inputs than were recorded"
    got, bounds = vectors.outputs(call, "cpu"), vectors.tolerances(call)
    assert [t.dtype for t in got] == [t.dtype for t in recorded["outputs"]]
    for ours, gpu, allowed in zip(got, recorded["outputs"], bounds, strict=True):
        finite = gpu.isfinite()
        assert torch.equal(ours[~finite], gpu[~finite])
        if not bool(finite.any()):
            continue
        if call.op in vectors.SAME_ORDER:
            assert ours.element_size() == 4 or int(steps(ours, gpu).max()) <= 1
            allowed = 2**-22 * gpu[finite].abs().max().item() if ours.element_size() == 4 else torch.inf
        if call.op == "indexer_scores" and call.sizes["bits"] <= 8:
            allowed = 0.0
        assert (ours[finite].double() - gpu[finite].double()).abs().max().item() <= allowed


def test_a_difference_is_seen():
    one = torch.tensor([1.0, -1.0, 0.0], dtype=torch.bfloat16)
    next_up = torch.tensor([1.0078125, -1.0078125, -0.0], dtype=torch.bfloat16)
    assert steps(one, one).tolist() == [0, 0, 0] and steps(one, next_up).tolist() == [1, 1, 0]
    assert steps(one[:1], -one[:1]) > 1 << 14 and steps(one[:1], one[:1] * torch.nan) > 1 << 39
