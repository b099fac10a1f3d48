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


@dataclass(frozen=True)
class Case:
    """Runs kernels with several simdgroups and several tiles of keys: those with these ``barriers`` of the source."""

    source: str
    barriers: range
    args: Callable[[], tuple[Any, ...]]


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
    "fp4_moe of many tokens": Case("fp4_moe", range(3), lambda: experts(40, 64, 32)),
    "fp4_moe": Case("fp4_moe", range(3, 7), lambda: experts(3, 4160, 32)),
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
        op.module("mps").build(call, METAL)(*values, *outs)


@pytest.mark.parametrize("source", sorted(p.stem for p in (paths.csrc() / "metal").glob("*.metal")))
def test_every_barrier_has_its_case(source: str):
    found = sorted(i for c in CASES.values() if c.source == source for i in c.barriers)
    assert any(c.source == source for c in CASES.values())
    assert found == list(range(len(BARRIER.findall(library.source(source, {})))))


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean(name: str):
    run(CASES[name])


MISSING = [  # those of the experts, the largest kernels, are compiled by make proof alone
    pytest.param(name, i, marks=[pytest.mark.proof] if c.source == "fp4_moe" else [])
    for name, c in CASES.items()
    for i in c.barriers
]


@pytest.mark.parametrize(("name", "index"), MISSING)
def test_a_missing_barrier_is_seen(name: str, index: int, monkeypatch: pytest.MonkeyPatch):
    original = library.source

    def without(source: str, defines: dict[str, Any]) -> str:
        text = original(source, defines)
        place = list(BARRIER.finditer(text))[index]
        return text[: place.start()] + ";" + text[place.end() :]

    monkeypatch.setattr(library, "source", without)
    with pytest.raises(metal.SimulationError, match="race|no thread of this threadgroup has written"):
        run(CASES[name])
