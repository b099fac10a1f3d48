"""Every barrier of the kernels is needed, and the simulator sees each that is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torch_attnkit import paths
from torch_attnkit.core import dispatch
from torch_attnkit.core.target import Target
from torch_attnkit.mps import known_answer, library
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^)]*\);")
METAL = Target("metal", simulated=True)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@dataclass(frozen=True)
class Case:
    """Runs kernels with several simdgroups and several tiles of keys: those with these ``barriers`` of the source."""

    source: str
    barriers: range
    args: Callable[[], tuple[Any, ...]]
    proof: bool = False  # whether make test leaves it out


def marks(name: str) -> tuple[Any, ...]:
    return (pytest.mark.proof,) if CASES[name].proof else ()


def experts(tokens: int, hidden: int, features: int) -> tuple[Any, ...]:
    """fp4_moe with rounded activations: all experts have tokens, and as many of them as fill more than one tile."""
    gen = torch.Generator().manual_seed(0)
    ones = lambda *shape: torch.full(shape, 0x38, dtype=torch.uint8)  # scales of one
    codes = lambda *shape: torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
    w13, w2 = codes(2, 2 * features, hidden // 2), codes(2, hidden, features // 2)
    scales = ones(2, 2 * features, hidden // 16), ones(2, hidden, features // 16)
    chosen = torch.tensor([[0, 1]], dtype=torch.int32).repeat(tokens, 1)
    given = (normal(tokens, hidden), normal(tokens, 2), chosen, w13, scales[0], w2, scales[1])
    return *given, *[None] * 6, "nvfp4", "nvfp4"


CASES = {
    "gated_rmsnorm": Case("gated_rmsnorm", range(1), lambda: (normal(2, 2000), normal(2, 2000), normal(2000))),
    # One row shared by several simdgroups, and the sums of its columns.
    "gated_rmsnorm_backward": Case(
        "gated_rmsnorm_backward", range(2), lambda: (*3 * [normal(300, 2000)], normal(2000)), proof=True
    ),
    "causal_conv1d": Case(
        "causal_conv1d",
        range(0),
        lambda: (normal(40, 64), normal(64, 4), normal(2, 64, 4), ints(0, 40), ints(1)),
    ),
    "gated_delta_rule": Case(
        "gated_delta_rule",
        range(2),
        lambda: (
            *2 * [normal(40, 1, 64)],
            normal(40, 2, 64),
            *2 * [normal(40, 2)],
            normal(2, 2, 64, 64),
            ints(0, 40),
            ints(1),
        ),
    ),
    "gated_delta_step": Case(
        "gated_delta_step",
        range(0),
        lambda: (
            *2 * [normal(1, 2, 1, 64)],
            normal(1, 2, 2, 64),
            *2 * [normal(1, 2, 2)],
            *2 * [normal(2)],
            normal(2, 2, 64, 64),
            ints(0, 1)[None],
        ),
    ),
    "kimi_delta_step": Case(
        "kimi_delta_step",
        range(1),
        lambda: (
            *2 * [normal(1, 2, 2, 64)],
            normal(1, 2, 2, 64),
            normal(1, 2, 2, 64),
            normal(1, 2, 2),
            normal(2),
            normal(2, 64),
            normal(2, 2, 64, 64),
            ints(0, 1)[None],
        ),
    ),
    "merge_partials": Case("merge_partials", range(0), lambda: (normal(3, 2, 4, 64), normal(3, 2, 4))),
    "sdpa_decode": Case("sdpa_decode", range(3), lambda: (normal(1, 4, 64), *2 * [normal(1, 1, 200, 64)], ints(200))),
    "sdpa_decode_paged": Case(
        "sdpa_decode_paged",
        range(3),
        lambda: (normal(1, 4, 64), *2 * [normal(5, 64, 1, 64)], ints(4, 2, 0, 1).reshape(1, 4), ints(200)),
    ),
    "sdpa_multi": Case(
        "sdpa_multi", range(2, 5), lambda: (normal(1, 2, 4, 64), *2 * [normal(1, 1, 200, 64)], ints(200))
    ),
    "sdpa_multi of many rows": Case(
        "sdpa_multi", range(2), lambda: (normal(1, 20, 4, 64), *2 * [normal(1, 1, 200, 64)], ints(200))
    ),
    "flash_attention": Case("flash_attention", range(2), lambda: (normal(1, 40, 2, 64), *2 * [normal(1, 90, 1, 64)])),
    "flash_attention_varlen": Case(
        "flash_attention_varlen",
        range(2),
        lambda: (normal(40, 2, 64), *2 * [normal(90, 1, 64)], ints(0, 40), ints(0, 90)),
    ),
    "flash_attention_paged": Case(
        "flash_attention_paged",
        range(2),
        lambda: (normal(40, 2, 64), *2 * [normal(6, 16, 1, 64)], ints(0, 40), ints(4, 2, 0, 5, 1, 3)[None], ints(90)),
    ),
    **{op: Case(op, range(0), lambda: (normal(3, 64),)) for op in ("nvfp4_quantize", "mxfp4_quantize")},
    "nvfp4_dequantize": Case("nvfp4_dequantize", range(0), lambda: (codes(3, 32), codes(3, 4))),
    "mxfp4_dequantize": Case("mxfp4_dequantize", range(0), lambda: (codes(3, 32), codes(3, 2))),
    "inverse_rope_fp4": Case(
        "inverse_rope_fp4", range(0), lambda: (normal(3, 2, 64), normal(3, 9), normal(3, 9), None, 2, "mxfp4", "128x4")
    ),
    "route_softmax": Case("route_softmax", range(0), lambda: (normal(5, 70), 40)),
    "route_sqrt_softplus": Case("route_sqrt_softplus", range(0), lambda: (normal(5, 1100), normal(1100), 6)),
    "route_hash": Case("route_hash", range(0), lambda: (normal(5, 9), ints(0, 2, 1, 1, 0), ints(*range(9)).view(3, 3))),
    "kv_cache_write": Case(
        "kv_cache_write", range(0), lambda: (normal(3, 192), codes(4, 260), ints(2, -1, 0), None, "fp8", 64)
    ),
    "paged_kv_cache_write": Case(
        "paged_kv_cache_write",
        range(0),
        lambda: (*(normal(3, 2, 64) for _ in "kv"), *(normal(2, 16, 2, 64) for _ in "kv"), ints(20, -1, 3)),
    ),
    "kv_cache_gather": Case(
        "kv_cache_gather", range(0), lambda: (codes(4, 260), ints(2, -1, 0, 2), None, "fp8", 192, 64)
    ),
    "rope_kv_cache_write": Case(
        "rope_kv_cache_write",
        range(0),
        lambda: (
            *(normal(3, 2, 192), normal(3, 192), codes(4, 260), ints(2, -1, 0), normal(3, 32), normal(3, 32)),
            *(None, 1e-6, "fp8", 64),
        ),
    ),
    "indexer_topk": Case("indexer_topk", range(5), lambda: (normal(2, 300), None, 7), proof=True),
    "indexer_scores": Case(
        "indexer_scores",
        range(1),
        lambda: (normal(2, 70, 64).half(), normal(1, 90, 64).half(), normal(2, 70), ints(90, 80)),
        proof=True,
    ),
    "indexer_select": Case(
        "indexer_select",
        range(6),
        lambda: (
            *(normal(2, 70, 64).half(), normal(1, 300, 64).half(), normal(2, 70), ints(300, 280)),
            *(*4 * [None], "none", 7),
        ),
        proof=True,
    ),
    "sparse_fmha_with_swa": Case(
        "sparse_fmha_with_swa", range(3), lambda: (normal(1, 9, 256), normal(1, 50, 256), ints(40)), proof=True
    ),
    "sparse_fmha_inverse_rope_fp4": Case(
        "sparse_fmha_inverse_rope_fp4",
        range(3),
        lambda: (normal(1, 9, 256), normal(1, 50, 256), ints(40), normal(1, 20), normal(1, 20)),
        proof=True,
    ),
    "grouped_output_projection": Case(
        "grouped_output_projection",
        range(1),
        lambda: (normal(9, 2, 300).half(), normal(2, 40, 300).half()),
        proof=True,
    ),
    "fp4_moe of many tokens": Case("fp4_moe", range(4), lambda: experts(40, 64, 32), proof=True),
    "fp4_moe": Case("fp4_moe", range(4, 8), lambda: experts(3, 4160, 32), proof=True),
    "known_answer": Case("known_answer", range(1), lambda: ()),
}


def run(case: Case) -> None:
    with metal.settings(mode="checked", strict=True):
        if case.source == "known_answer":
            wrong = known_answer.wrong(METAL, "cpu")
            if wrong:
                raise metal.SimulationError("; ".join(wrong))
            return
        op, args = dispatch.OPS[case.source], case.args()
        values = (*args, *(op.defaults.get(n) for n in op.argnames[len(args) :]))
        call = op.bind(values)
        outs = [torch.empty(shape, dtype=dtype) for shape, dtype in op.outputs(call)]
        dispatch.build(op, call, METAL)(*values, *outs)


@pytest.mark.parametrize("source", sorted(p.stem for p in (paths.csrc() / "metal").glob("*.metal")))
def test_every_barrier_has_its_case(source: str):
    found = sorted(i for c in CASES.values() if c.source == source for i in c.barriers)
    assert any(c.source == source for c in CASES.values())
    assert found == list(range(len(BARRIER.findall(library.source(source, {})))))


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_the_kernels_themselves_are_clean(name: str):
    run(CASES[name])


@pytest.mark.parametrize(
    ("name", "index"), [pytest.param(name, i, marks=marks(name)) for name, c in CASES.items() for i in c.barriers]
)
def test_a_missing_barrier_is_seen(name: str, index: int, monkeypatch: pytest.MonkeyPatch):
    original = library.source

    def without(source: str, defines: dict[str, Any]) -> str:
        text = original(source, defines)
        barrier = list(BARRIER.finditer(text))[index]
        return text[: barrier.start()] + ";" + text[barrier.end() :]

    monkeypatch.setattr(library, "source", without)
    # Counters that are added up by atomic operations are no race, but with wrong ones places are chosen past the K-th.
    with pytest.raises(metal.SimulationError, match="race|no thread of this threadgroup has written|out of bounds"):
        run(CASES[name])
