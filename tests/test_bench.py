"""The gate looks at all of an output, and what a run of some of an op's cases leaves in the baseline."""

import dataclasses
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_attnkit
from bench import gate, tune
from bench.__main__ import merged
from torch_attnkit import parity, warmup
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.warmup import bench_inputs

# Bytes of a part: all at once, and so few that everything is cut that can be.
PARTS = (gate.PART, 1)
CALLS = [
    ("flash_attention", "square", ("gqa", "causal", "sink")),
    ("flash_attention", "more-queries", ("gqa", "unnormalized", "scales")),
    ("flash_attention_varlen", "tail", ("gqa",)),
    ("sdpa_decode", "ragged", ("gqa", "kv_start", "window", "scales")),
    ("sdpa_decode_paged", "ragged", ("gqa",)),
    ("sdpa_multi", "ragged", ("gqa", "softcap")),
    ("flash_attention_paged", "gather", ("gqa",)),
    ("merge_partials", "odd", ("sink", "row_sum")),
    ("gated_rmsnorm", "heads", ()),
]


def _call(name: str, shape: str, features: tuple[str, ...]):
    op = OPS[name]
    args, kwargs = parity.inputs(op, shape, torch.bfloat16, features)
    out = parity.reference_of(op, args, kwargs, double=False)
    return op, args, kwargs, out


@pytest.mark.parametrize("size", PARTS)
@pytest.mark.parametrize(("name", "shape", "features"), CALLS)
def test_parts_hold_every_output_once(name, shape, features, size, monkeypatch):
    monkeypatch.setattr(gate, "PART", size)
    op, args, kwargs, out = _call(name, shape, features)
    outs = dict(zip(op.outnames, out, strict=True))
    parts = list(gate.parts_of(op, dict(zip(op.argnames, args, strict=False)) | outs))
    assert len(parts) == 1 if size == gate.PART and size > 1 else len(parts) > 1
    for output, tensor in outs.items():
        if tensor.numel():
            seen = torch.zeros(tensor.shape, dtype=torch.int32)
            for part in parts:
                part.of(output, seen).add_(1)
            assert bool((seen == 1).all()), output


@pytest.mark.parametrize("size", PARTS)
@pytest.mark.parametrize(("name", "shape", "features"), [*CALLS, ("kv_cache_write", "fp8", ())])
def test_an_error_anywhere_is_found(name, shape, features, size, monkeypatch):
    monkeypatch.setattr(gate, "PART", size)
    op, args, kwargs, out = _call(name, shape, features)
    assert gate.gate(op, args, kwargs, out) <= 1
    gen = torch.Generator().manual_seed(0)
    for i, tensor in enumerate(out):
        for index in torch.randint(tensor.numel(), (6,), generator=gen).tolist() if tensor.numel() else ():
            wrong = [t.clone() for t in out]
            flat = wrong[i].view(-1)
            flat[index] = 0.0 if flat[index].isinf() else flat[index] + 1.0
            with pytest.raises(AssertionError):
                gate.gate(op, args, kwargs, tuple(wrong))


def test_few_parts_are_spread_over_all(monkeypatch):
    monkeypatch.setattr(gate, "PART", 1)
    op, args, kwargs, out = _call(*CALLS[0])
    seen = []
    monkeypatch.setattr(gate, "_checked", lambda op, part, *rest: seen.append(str(part)) or 0.0)
    gate.gate(op, args, kwargs, out)
    every, few = list(seen), seen.clear()
    gate.gate(op, args, kwargs, out, most=3)
    assert few is None and len(every) == 8 and seen == [every[0], every[2], every[5]]


def _line(case: str, us: float, dtype: str = "bfloat16") -> dict:
    return {"op": "o", "case": case, "dtype": dtype, "us": us}


def _record(commit: str, *lines: dict, device: str = "d") -> dict:
    return {"device": device, "commit": commit, "lines": list(lines)}


def test_lines_of_other_runs_stay_and_say_which():
    cases = ["a", "b", "c"]
    first = merged(None, _record("1", _line("a", 1.0), _line("b", 2.0), _line("gone", 3.0)), cases)
    assert first == _record("1", _line("a", 1.0), _line("b", 2.0))
    second = merged(first, _record("2", _line("c", 5.0), _line("b", 4.0)), cases)
    assert second == _record("2", _line("a", 1.0) | {"run": {"commit": "1"}}, _line("b", 4.0), _line("c", 5.0))
    third = merged(second, _record("3", _line("c", 6.0), device="e"), cases)
    runs = [line.get("run") for line in third["lines"]]
    assert runs == [{"commit": "1", "device": "d"}, {"commit": "2", "device": "d"}, None]


def test_a_line_without_a_number_leaves_the_one_that_was_there():
    first = merged(None, _record("1", _line("a", 1.0)), ["a", "b"])
    wrong = [{"op": "o", "case": case, "dtype": "bfloat16", "error": "refused"} for case in "ab"]
    assert merged(first, _record("1", *wrong), ["a", "b"])["lines"] == [_line("a", 1.0) | {"run": {}}]


def test_dtypes_are_lines_of_their_own():
    first = merged(None, _record("1", _line("a", 1.0)), ["a"])
    both = merged(first, _record("1", _line("a", 2.0, "float16")), ["a"])["lines"]
    assert [(line["dtype"], line["us"]) for line in both] == [("bfloat16", 1.0), ("float16", 2.0)]


@pytest.mark.parametrize("family", tune.FAMILIES)
def test_neighbours_of_a_tables_entry_differ_from_it_in_one_number(family):
    def measured(entry):
        return re.findall(r"\w+=|\d+|True|False|None", repr(entry))

    for entry in tune.FAMILIES[family].entries().values():
        for other in tune.neighbours(entry):
            assert type(other) is type(entry)
            assert sum(a != b for a, b in zip(measured(entry), measured(other), strict=True)) == 1, (entry, other)


@pytest.mark.simulator
@pytest.mark.seconds(300)
@pytest.mark.proof
def test_a_search_compiles_judges_and_times_what_differs(monkeypatch, capsys):
    """In the simulator, with times that are made up: 16 query heads, whose table has tiles of 64 keys, two on an SM."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    tuned, op = tune.FAMILIES["decode"], OPS["sdpa_decode"]
    dims = dict(B=1, Hq=16, Hkv=1, S=600, D=64, Dv=64)
    args, kwargs = bench_inputs(op, dims, torch.bfloat16, torch.Generator().manual_seed(0))
    values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
    key, entries = tuned.key_of(dims), tuned.entries()
    first = entries[key]

    def neighbours(entry):
        """A plan that cannot be, one that changes nothing here, a kernel that does not compile, and two that gain."""
        for tile in ((64, 0), entry.tile, (24, 2), (48, 2), (64, 1)):
            yield dataclasses.replace(entry, tile=tile, much=0)

    monkeypatch.setattr(tune, "neighbours", neighbours)
    timed = []

    def measure(runs):
        timed.append(len(runs))
        return [10.0, 8.0, 9.0][: len(runs)]

    with torch_attnkit.simulate("sm90"):
        case = tune.Case(op, args, kwargs, [values], prepare=lambda calls: [call() for call in calls], measure=measure)
        found = list(tune.search(case, entries, key, rounds=2, jobs=1))
    assert entries[key] is first and timed == [3, 1]
    best, good = (dataclasses.replace(first, tile=tile, much=0) for tile in ((48, 2), (64, 1)))
    assert found == [(first, 10.0, 1.0), (best, 8.0, 0.8), (good, 9.0, 0.9)]
    printed = capsys.readouterr().out
    assert "tile=(64, 0)" in printed and "ZeroDivisionError" in printed and "does not compile" in printed


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [op.name for op in OPS.values() if any(row.on != "cpu" for row in op.kernels)])
def test_every_line_is_planned_ahead_of_time(name):
    """In all dtypes: ``warmup`` compiles its kernels, though some lines are of gigabytes and lengths decide on some."""
    op = OPS[name]
    rows = [row for row in op.kernels if {"sm90", "sm100"} & set(row.archs)]
    dtypes = {dtype for row in rows for dtype in row.dtypes.split()} & {"bf16", "f16", "f8e4m3"}
    lines = sum(1 for _ in warmup._bench_calls(op, rows, FakeTensorMode()))
    assert lines == len(dtypes) * len(op.module("cases").BENCH)
