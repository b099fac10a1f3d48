"""The parity cases themselves: which values meet, and whether each feature has something to do in its cases."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_attnkit import digest, parity
from torch_attnkit.core import Target
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Kernel, Op
from torch_attnkit.core.support import support
from torch_attnkit.oracle import fp4
from torch_attnkit.parity import case as parity_case
from torch_attnkit.parity import runners
from torch_attnkit.parity.covering import covering, pairs
from torch_attnkit.parity.extra import spoiled
from torch_attnkit.warmup import bench_inputs

# An arch that a row serves changes nothing but the names of its cases: the first stands for all.
ROWS = [(op, index, arch) for op, index, row, arch in support() if arch == row.archs[0]]
IDS = [f"{op.name}-{arch}-{index}" for op, index, arch in ROWS]
# What switches a feature off, where that is not the argument of its name at its default.
OFF = {
    "unnormalized": {"normalize": True},
    "bidirectional": {"causal": True},
    "renormalize": {"renormalize": False},
    "scales": {"q_scale": None, "k_scale": None, "v_scale": None},
    "swizzled": {"scale_layout": "linear"},
    "floor": {"rounding": "ceil"},
    "gptoss": {"swiglu": "silu"},
    "bias": {"bias": None, "bias13": None, "bias2": None},
    "global_scale": dict.fromkeys(
        ("global_scale", "w13_global", "w2_global", "x_global", "h_global", "o_global", "wo_global")
    ),
    "compressed": dict.fromkeys(("compressed_kv", "topk_indices", "compressed_len", "compressed_block_table")),
    "topk": {"topk_indices": None},
}
COLUMNS = ("dtype", "dims", "features", "shape")


def test_an_arch_changes_nothing_but_the_names_of_cases():
    op, index, row, arch = next(r for r in support("sm120") if r[0].name == "gated_rmsnorm")
    assert arch != row.archs[0]
    for few in (False, True):
        found = parity.cases(op, index, arch, covering=few)
        same = [dataclasses.replace(c, arch=row.archs[0]) for c in found]
        assert same == parity.cases(op, index, row.archs[0], covering=few) != found


def columns(op: Op, row: Kernel) -> list[list]:
    """What the array of a row is made of, written down once more."""
    sizes = itertools.product(*([(axis, size) for size in sizes] for axis, sizes in row.dims.items()))
    features = parity.feature_sets(op, tuple(row.features.split()))
    return [row.dtypes.split(), list(sizes), features, list(op.module("cases").PARITY)]


def ordinary(op: Op, index: int, arch: str) -> list[parity.Case]:
    found = parity.cases(op, index, arch, covering=True)
    return [c for c in found if not c.extra and c.shape in op.module("cases").PARITY]


def missing(op: Op, index: int, arch: str) -> set:
    """Pairs that no case of the row holds although an accepted one could."""
    found = ordinary(op, index, arch)
    held = set(itertools.chain(*(pairs(tuple(getattr(c, name) for name in COLUMNS)) for c in found)))
    every = columns(op, op.kernels[index])
    left = set(itertools.chain(*map(pairs, itertools.product(*every)))) - held
    return {
        pair for pair in left if any(parity.accepted(parity.Case(op.name, index, arch, *c)) for c in of(every, pair))
    }


def of(every: list[list], pair: tuple) -> itertools.product:
    """All combinations that hold a pair."""
    i, a, j, b = pair
    return itertools.product(*([a] if n == i else [b] if n == j else column for n, column in enumerate(every)))


# The caches of a feature that only says where they are.
PAGED = {"paged": ("k",), "swa_paged": ("swa_kv",), "compressed_paged": ("compressed_kv",)}


def without(op: Op, feature: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The call with one feature left out. Grouped heads are not: each gets the KV head that a wrong division gives.
    Scales in the 128x4 order are read as if that were the linear one, and of pages others than the table names."""
    values = dict(zip(op.argnames, args, strict=False)) | kwargs
    if feature == "gqa":
        axis = "Hkv"
        for name in op.tensors:
            axes = [a.name for a in op.spec(name).axes]
            if axis in axes and values.get(name) is not None:
                values[name] = values[name].flip(axes.index(axis))
    for name in PAGED.get(feature, ()):
        if name in values:
            values[name] = values[name].flip(0)
    if feature == "swizzled":  # the first of the same bytes, read as linear scales
        of = {"scale": "codes", "w13_scale": "w13", "w2_scale": "w2", "o_scale": "o", "wo_scale": "wo_a"}
        for scale, named in of.items():
            if scale in values:
                codes = values[named]
                blocks = codes.shape[-1] * 2 // fp4.BLOCK[values.get("format") or op.name.split("_")[0]]
                count = codes.shape[:-1].numel() * blocks
                values[scale] = values[scale].flatten()[:count].view(*codes.shape[:-1], blocks)
    values |= OFF.get(feature, {} if feature == "gqa" else {feature: op.defaults.get(feature)})
    return tuple(values[n] for n in op.argnames[: len(args)]), {n: values[n] for n in kwargs}


def matters(case: parity.Case, feature: str) -> bool:
    """Whether the reference gives something else without the feature, or looks where nobody may: at a page of -1."""
    op = OPS[case.op]
    args, kwargs = parity.arguments(case)
    result = parity.reference_of(op, args, kwargs, double=False)
    try:
        other = parity.reference_of(op, *without(op, feature, args, kwargs), double=False)
    except ValueError:
        return True
    return any(
        a.shape != b.shape
        or not torch.equal(*(t.float().nan_to_num() if t.itemsize == 1 else t.nan_to_num() for t in (a, b)))
        for a, b in zip(result, other, strict=True)
    )


@pytest.mark.parametrize(("op", "index", "arch"), ROWS, ids=IDS)
def test_every_pair_that_can_occur_does(op, index, arch):
    assert not missing(op, index, arch)


# Rows of one file differ in their sizes alone; of each op the first of every file stands for them.
SAMPLE = list({(op.name, op.kernels[index].on, arch): (op, index, arch) for op, index, arch in reversed(ROWS)}.values())


@pytest.mark.parametrize(("op", "index", "arch"), SAMPLE, ids=[f"{o.name}-{a}-{i}" for o, i, a in SAMPLE])
def test_every_feature_has_an_effect_alone_and_together(op, index, arch):
    found = ordinary(op, index, arch)
    names = tuple(op.kernels[index].features.split())
    for feature in names:
        for features in [(feature,), *(s for s in parity.all_features(op, names) if feature in s)]:
            matching = [c for c in found if c.features == features]
            assert any(matters(c, feature) for c in matching), f"{feature} does nothing in {[c.id for c in matching]}"


@pytest.mark.parametrize(("op", "index", "arch"), SAMPLE, ids=[f"{o.name}-{a}-{i}" for o, i, a in SAMPLE])
def test_every_feature_set_meets_shapes_with_something_to_see(op, index, arch):
    """Several of them, and the degenerate ones without features and with all."""
    found = parity.cases(op, index, arch, covering=True)
    names = tuple(op.kernels[index].features.split())
    module = op.module("cases")
    for features in parity.feature_sets(op, names):
        held = {c.shape for c in found if c.features == features and not c.extra}
        assert len(held & module.PARITY.keys()) >= min(3, len(module.PARITY)), features
    for features in {(), *parity.all_features(op, names)}:
        for shape in module.DEGENERATE:
            case = next((c for c in found if (c.features, c.shape) == (features, shape)), None)
            made = parity.Case(op.name, index, arch, found[0].dtype, found[0].dims, features, shape)
            assert case or not parity.accepted(made), made.id


def interleaved(columns, accepted, dear):
    """The pairing of before: each column by itself, from its start again when it is through."""
    longest = max(map(len, columns))
    return [tuple(c[i % len(c)] for c in columns) for i in range(longest)]


def test_columns_in_turns_are_no_covering_array(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    op, index, arch = next(row for row in ROWS if (row[0].name, row[2]) == ("flash_attention", "sm90"))
    monkeypatch.setattr(parity_case, "covering_array", interleaved)
    assert missing(op, index, arch)
    with pytest.raises(AssertionError):
        test_every_feature_set_meets_shapes_with_something_to_see(op, index, arch)


def test_what_was_chosen_is_remembered_until_its_sources_change(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    op, index, arch = next(row for row in ROWS if (row[0].name, row[2]) == ("gated_rmsnorm", "sm80"))
    found = parity.cases(op, index, arch, covering=True)
    monkeypatch.setattr(parity_case, "covering_array", interleaved)
    assert parity.cases(op, index, arch, covering=True) == found
    monkeypatch.setattr(digest, "of_modules", lambda *names: "others")
    assert parity.cases(op, index, arch, covering=True) != found


def test_an_array_is_small_and_keeps_to_what_is_accepted():
    sizes = (2, 3, 5, 4)
    every = [[f"{n}{i}" for i in range(size)] for n, size in zip("abcd", sizes, strict=True)]
    accepted = lambda c: c[:2] != ("a0", "b0") and (c[2], c[3]) != ("c1", "d1")
    found = covering(every, accepted, 3)
    assert all(map(accepted, found)) and len(found) == len(set(found))
    held, wanted = (
        set(itertools.chain(*map(pairs, some))) for some in (found, filter(accepted, itertools.product(*every)))
    )
    assert held == wanted
    assert len(found) <= 22  # the two longest columns alone have 20 pairs
    assert len({c[:3] for c in found}) <= 16  # of what is compiled, 3 x 5 pairs
    assert found == covering(every, accepted, 3)


def test_what_a_row_refuses_is_told_apart():
    op = OPS["sdpa_decode_paged"]
    index = next(i for i, row in enumerate(op.kernels) if row.on == "sm90")
    dims = tuple((axis, sizes[0]) for axis, sizes in op.kernels[index].dims.items())
    case = parity.Case(op.name, index, "sm90", "bf16", dims, (), "odd-page")
    assert parity.run(case) is None
    assert (
        parity.outcome(runners.Runner("cpu", "here", Target("sm90", simulated=True)), case, "cpu", "contiguous", 0)
        is None
    )
    assert not parity.accepted(case)
    assert "odd-page" not in {c.shape for c in parity.cases(op, index, "sm90", covering=True)}


def test_extra_cases_are_part_of_a_case():
    op = OPS["flash_attention"]
    cases = parity.cases(op, 0, "cpu", covering=True)
    names = {c.id for c in cases}
    assert len(names) == len(cases)
    assert {"nan:q", "nan:k", "nan:v", "nan:sink", "sink:-inf", "sink:inf", ""} == {c.extra for c in cases}
    case = next(c for c in cases if c.extra == "sink:-inf")
    assert case.id.endswith("-square-sink:-inf]") and pickle.loads(pickle.dumps(case)) == case
    sink = parity.arguments(case)[0][op.argnames.index("sink")]
    assert sink.isneginf().any() and sink.isfinite().any()


def agreed(op: Op, case: parity.Case, nan: torch.Tensor) -> bool:
    """Whether a NaN in a value shows in all queries of a sequence that see anything, or in none."""
    if not op.name.startswith(("flash", "sdpa_multi")) or case.extra not in ("nan:v", "nan:v_cache"):
        return True
    args, kwargs = parity.arguments(case)
    lse = parity.reference_of(op, args, kwargs, double=False)[1]
    seen = lse.isfinite()[..., None].expand_as(nan)  # (B, T, Hq, Dv), or (Tq, Hq, Dv)
    if "cu_seqlens_q" in op.argnames:
        cut = args[op.argnames.index("cu_seqlens_q")].diff().tolist()
        each = list(zip(nan.split([*cut, len(nan) - sum(cut)]), seen.split([*cut, len(nan) - sum(cut)]), strict=True))
    else:
        each = list(zip(nan, seen, strict=True))
    return all(torch.equal(n, n.any(0, keepdim=True) & s) for n, s in each)


def refuses_nan(op: Op, name: str) -> bool:
    """Whether the reference accepts no NaN in a tensor, so that no case can have one."""
    (features, *_) = parity.all_features(op, tuple(op.features))
    args, kwargs = parity.inputs(op, next(iter(op.module("cases").PARITY)), torch.float32, features)
    if args[op.argnames.index(name)] is None:
        return False
    try:
        parity.reference_of(op, spoiled(op, f"nan:{name}", args), kwargs, double=False)
    except ValueError as error:
        return f"{name} holds nan" in str(error)
    return False


def rows_with_extras() -> Iterator[Any]:
    """Of every op Metal's last row; where D is an axis, what is drawn follows it, so of these ops every row."""
    for op in (op for op in OPS.values() if hasattr(op.module("cases"), "EXTRAS")):
        last = max(i for i, row in enumerate(op.kernels) if row.on == "mps")
        for i, row in enumerate(op.kernels):
            if i == last or "D" in row.dims:
                arch = "metal" if row.on == "mps" else row.archs[0]
                marks = () if i == last else pytest.mark.sample(8)
                yield pytest.param(op, i, arch, id=f"{op.name}-{arch}-{i}", marks=marks)


@pytest.mark.parametrize(("op", "index", "arch"), [*rows_with_extras()])
def test_nan_comes_out_in_some_places_and_not_in_others(op, index, arch):
    """Every tensor that may hold a NaN has a case with one."""
    cases = [c for c in parity.cases(op, index, arch, covering=True) if c.extra]
    floats = {
        n for n in op.tensors if {"T", "T8", "f32"} & set(op.spec(n).dtypes) and not n.endswith(("_scale", "_global"))
    }
    shown = set()
    for case in cases:
        # The first gradient has a sum of each row; the second shows a NaN where it was.
        which = 1 if op.name == "gated_rmsnorm_backward" else 0
        results = parity.reference_of(op, *parity.arguments(case), double=False)
        # What is written in place and what is returned, where an op has both.
        out = torch.cat([t.flatten() for t in results]) if op.mutated and op.outnames else results[which]
        if out.is_floating_point():
            nan = out.isnan()
            assert not nan.all(), case.id
        else:  # indices: NaN shows by what else is chosen
            clean = parity.arguments(dataclasses.replace(case, extra=""))
            nan = out != parity.reference_of(op, *clean, double=False)[which]
        if case.extra.startswith("nan:"):
            shown |= {case.extra.removeprefix("nan:")} if nan.any() else set()
        else:
            assert not nan.any(), case.id
        assert agreed(op, case, nan), f"{case.id}: some queries see the NaN and some do not"
    assert shown == {name for name in floats if not refuses_nan(op, name)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lengths_and_tables_are_drawn_whatever_else_is_not(device):
    """Else they would be what was in memory before, and gigabytes might be made after them."""
    op, made = OPS["indexer_select"], []
    dims, gen = op.module("cases").BENCH["mxfp4-1-1x65536"], torch.Generator()
    for mode in (contextlib.nullcontext(), parity.ShapesOnly(device)):
        with mode:
            made.append(bench_inputs(op, dims, torch.bfloat16, gen.manual_seed(0))[0])
    filled, empty = [dict(zip(op.argnames, args, strict=False)) for args in made]
    for name in ("k_len", "block_table"):
        assert torch.equal(filled[name], empty[name])
    assert empty["k"].is_meta == (device == "meta")
    for name, tensor in empty.items():
        if tensor is not None:
            assert parity.materialised(tensor).device.type == "cpu"
            assert parity.materialised(tensor).shape == filled[name].shape, name
