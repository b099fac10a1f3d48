"""A size that a row accepts is planned: no table of a family lacks what the row's table has."""

from __future__ import annotations

import contextlib
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
from torch_attnkit.kernels.decode.plan import FP8_KV_HEADS
from torch_attnkit.kernels.decode.sm90 import plan as decode_sm90
from torch_attnkit.kernels.decode.sm100 import plan as decode_sm100
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, FP8, FP8_KV, TILES, heads
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
            with parity.ShapesOnly():
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


TABLES: dict[str, tuple[dict[Any, Any], Any]] = {  # of a table, an entry that is not there
    "sm90": (TILES, (BITS16, *NEW)),
    "sm90 fp8": (TILES, (FP8, *NEW)),
    "sm100": (prefill_sm100.TILES, NEW),
}
PREFILL = ("flash_attention", "flash_attention_varlen", "flash_attention_paged", "sdpa_multi")


@contextlib.contextmanager
def added(name: str) -> Iterator[dict[str, Op]]:
    """The family's ops with one more head size: one entry of a table, as the last one."""
    table, key = TABLES[name]
    modules = {op: importlib.import_module(f"torch_attnkit.ops.{op}.op") for op in PREFILL}
    alike = next(k for k in reversed(table) if (k[:-2], k[-1]) == (key[:-2], 256))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table, key, table[alike])
        yield {
            op: replace(importlib.reload(module).OP, package=f"torch_attnkit.ops.{op}")
            for op, module in modules.items()
        }
    for module in modules.values():
        importlib.reload(module)


@pytest.mark.parametrize("name", TABLES)
def test_one_entry_is_a_head_size_of_every_op(name: str):
    with added(name) as ops:
        for op, record in ops.items():
            rows = [row for row in record.kernels if row.on != "mps" and 160 in row.dims.get("D", ())]
            assert rows, op
            for row in rows:
                only = replace(row, dims=row.dims | {"D": (160,)} | ({"Dv": (160,)} if "Dv" in row.dims else {}))
                assert unplanned(record, only, row.archs[0]) == []


def test_tables_of_choices_have_no_size_that_no_row_accepts():
    assert sum(len(heads(of)) for of in (BITS16, FP8, FP8_KV)) + len(heads(BITS16, wide=True)) == len(TILES)
    assert set(FP8_KV_HEADS) <= decode_sm90.HEADS.keys() & decode_sm100.HEADS.keys()
