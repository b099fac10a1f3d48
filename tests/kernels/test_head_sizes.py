"""A size that a row accepts is planned: no table of a family lacks what the row's table has."""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from torch_attnkit import parity
from torch_attnkit.core import Kernel, Op, Target
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.core.support import support
from torch_attnkit.cuda import compile
from torch_attnkit.kernels.decode import codes
from torch_attnkit.kernels.decode.sm90 import plan as decode_sm90
from torch_attnkit.kernels.decode.sm100 import plan as decode_sm100
from torch_attnkit.kernels.prefill.sm90 import (
    codes_plan,
    dynamic_plan,
    halves_plan,
    multi_codes_plan,
    multi_plan,
    paged_plan,
    plan,
)
from torch_attnkit.kernels.prefill.sm100 import plan as prefill_sm100
from torch_attnkit.mps import library

NEW = (160, 160)
SIZED = sorted({(op.name, arch) for op, _, row, arch in support() if row.dims and arch != "cpu"})


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of CUDA kernels requests are made, of Metal's the text is not read."""
    pipelines: Any = defaultdict(lambda: SimpleNamespace(max_threads_per_threadgroup=1024))
    compiled: Any = type("Compiled", (), {"__getattr__": lambda self, name: pipelines[name]})()
    monkeypatch.setattr(library, "load", lambda *_, **__: library.Library(compiled, defaultdict(int)))
    with compile.recording():
        yield


def unplanned(op: Op, row: Kernel, arch: str) -> list[str]:
    """The sizes that the row accepts and of which no plan is made, in every shape of the op's cases."""
    found = []
    for sizes in itertools.product(*row.dims.values()):
        dims, count = tuple(zip(row.dims, sizes, strict=True)), 0
        for shape in parity.shapes(op):
            with parity.Undrawn():
                args = parity.inputs(op, shape, DTYPES[row.dtypes.split()[0]], (), dims)
            call = parity.bound(op, *args)
            if row.refusal(call) is not None:
                continue
            count += 1
            try:
                op.build(row, call, Target(arch, simulated=True))
            except KeyError as error:
                found.append(f"{op.name} on {arch} accepts {call.sizes()}, but a table of its plan has no {error}")
        assert count, f"{op.name}: no case has {dims}"
    return found


@pytest.mark.parametrize(("name", "arch"), SIZED)
def test_of_every_size_that_a_row_accepts_a_plan_is_made(name: str, arch: str):
    op = OPS[name]
    assert [words for row in op.kernels if row.dims and arch in row.archs for words in unplanned(op, row, arch)] == []


TABLES = {
    "plan": plan.TILES, "multi_plan": multi_plan.TILES, "halves_plan": halves_plan.TILES,
    "codes_plan": codes_plan.TILES, "multi_codes_plan": multi_codes_plan.TILES, "sm100": prefill_sm100.TILES,
}  # fmt: skip
PREFILL = ("flash_attention", "flash_attention_varlen", "flash_attention_paged", "sdpa_multi")


@pytest.mark.parametrize("name", TABLES)
def test_a_size_in_one_table_alone_is_planned_or_told_of(name: str, monkeypatch: pytest.MonkeyPatch):
    """What a new head size would meet: rows that read the table take it, and no other row of the family."""
    table: dict[Any, Any] = TABLES[name]
    modules = [importlib.import_module(f"torch_attnkit.ops.{op}.op") for op in PREFILL]
    told: list[str] = []
    taken: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setitem(table, NEW, next(reversed(table.values())))
        for module, op in zip(modules, PREFILL, strict=True):
            record = replace(importlib.reload(module).OP, package=f"torch_attnkit.ops.{op}")
            for row in (r for r in record.kernels if r.on != "mps" and 160 in r.dims.get("D", ())):
                taken.add(op)
                only = replace(row, dims=row.dims | {"D": (160,)} | ({"Dv": (160,)} if "Dv" in row.dims else {}))
                told += unplanned(record, only, row.archs[0])
    for module in modules:
        importlib.reload(module)
    dense = {"flash_attention", "flash_attention_varlen"}
    cached = {"flash_attention_paged", "sdpa_multi"}
    of = {"multi_plan": cached, "multi_codes_plan": cached, "sm100": dense | cached}
    assert taken == of.get(name, dense)
    # Long blocks of E4M3 at the end of a cache are a dense batch, of codes_plan's tiles.
    assert {words.split(" accepts")[0] for words in told} <= {"sdpa_multi on sm90"}
    assert bool(told) == (name == "multi_codes_plan")
    assert all("a table of its plan has no (160, 160)" in words for words in told)


def test_tables_of_choices_have_no_size_that_no_row_accepts():
    assert dynamic_plan.DRAWN.keys() <= plan.TILES.keys()
    assert paged_plan.DRAWN.keys() <= multi_plan.TILES.keys()
    assert set(codes.HEADS) <= decode_sm90.HEADS.keys() & decode_sm100.HEADS.keys()
