"""Calls just outside the contract or the rows are refused, with words that name op, argument, found and accepted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core import Call, Kernel, Op, Target, UnsupportedError, dispatch, simulate
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.core.support import support

ALL = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def _call(op, full=False):
    features = parity.feature_sets(op, tuple(op.features))[-1] if full else ()
    args, kwargs = parity.inputs(op, next(iter(parity.shapes(op))), torch.float32, features)
    return list(args), kwargs, getattr(torch.ops.attnkit, op.name)


def _mutated_is_untouched(op, args, before):
    for new, old in zip(parity.mutated(op, tuple(args)), parity.mutated(op, tuple(before)), strict=True):
        assert torch.equal(new, old), "nothing is written before validation passes"


@ALL
def test_wrong_rank_names_the_argument_and_its_axes(op):
    for i, name in enumerate(op.tensors):
        args, kwargs, call = _call(op, full=True)
        if args[i] is None or op.spec(name).batch:
            continue
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        args[i] = args[i][None]
        with pytest.raises(ValueError, match=rf"^{op.name}: {name} must be \(.*got shape"):
            call(*args, **kwargs)
        args[i] = args[i][0]
        _mutated_is_untouched(op, args, before)


@ALL
def test_wrong_dtype_names_found_and_accepted(op):
    for i, name in enumerate(op.tensors):
        args, kwargs, call = _call(op, full=True)
        if args[i] is None:
            continue
        args[i] = torch.zeros(args[i].shape, dtype=torch.complex64)
        with pytest.raises(TypeError, match=rf"^{op.name}: {name} is complex64, accepted: "):
            call(*args, **kwargs)


@ALL
def test_mixed_devices_are_refused(op):
    args, kwargs, _ = _call(op, full=True)
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    if len(tensors) < 2:
        assert len(op.tensors) <= 2
        return
    args[tensors[-1]] = args[tensors[-1]].to("meta")
    values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
    with pytest.raises(ValueError, match=rf"^{op.name}: {op.argnames[tensors[-1]]} is on meta, but .* is on cpu"):
        op.bind(values)


@ALL
def test_last_dimension_must_be_contiguous(op):
    """But that of index tensors, sinks and scales: tests/core/test_unusual_tensors.py."""
    for i, name in enumerate(op.tensors):
        args, kwargs, call = _call(op, full=True)
        if args[i] is None or args[i].dim() == 0 or args[i].shape[-1] < 2:
            continue
        if args[i].dtype in (torch.int32, torch.int64) or op.spec(name).small:
            assert args[i].dim() <= 2
            continue
        args[i] = args[i].repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(
            ValueError, match=rf"^{op.name}: {name} must be contiguous in its last dimension, got strides"
        ):
            call(*args, **kwargs)


@ALL
def test_nan_scalars_and_unknown_choices_are_refused(op):
    for argument in op.parsed.arguments:
        args, kwargs, call = _call(op)
        if "float" in str(argument.type):
            with pytest.raises(ValueError, match=rf"^{op.name}: {argument.name} is nan"):
                call(*args, **(kwargs | {argument.name: float("nan")}))
        if str(argument.type) == "str":
            with pytest.raises(ValueError, match=rf"^{op.name}: {argument.name} is 'nonsense', accepted: "):
                call(*args, **(kwargs | {argument.name: "nonsense"}))


@pytest.mark.parametrize("missing", ["torch_attnkit.sim", "torch_attnkit.sim.ptx", "torch_attnkit.sim.metal"])
def test_a_missing_simulator_is_named(missing, monkeypatch):
    for name in [m for m in sys.modules if m == missing or m.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # an import of it fails
    for arch, module in (("metal", "torch_attnkit.sim.metal"), ("sm90", "torch_attnkit.sim.ptx")):
        if module.startswith(missing):
            message = rf"^simulate\('{arch}'\): this version has no simulator for it \({missing}[.\w]* is missing\)"
            with pytest.raises(UnsupportedError, match=message), simulate(arch):
                pass
        else:
            with simulate(arch) as target:
                assert target.arch == arch


ROWS = [(op, row, arch) for op, _, row, arch in support()]


@pytest.mark.parametrize(("op", "row", "arch"), ROWS, ids=[f"{o.name}-{r.on}-{a}" for o, r, a in ROWS])
def test_just_outside_a_row_is_refused_with_its_reason(op, row, arch):
    """The complement of the row: a dtype, a size and a feature that it does not list."""
    args, kwargs, _ = _call(op)

    def bound(dtype=torch.float32, features=()):
        made, kw = parity.inputs(op, next(iter(parity.shapes(op))), dtype, features)
        return parity.bound(op, made, kw)

    for name in {"f32", "bf16", "f16"} - set(row.dtypes.split()):
        assert row.refusal(bound(DTYPES[name])) == f"dtype {name} not in {{{', '.join(row.dtypes.split())}}}"
    dtype = DTYPES[row.dtypes.split()[0]]
    for feature in set(op.features) - set(row.features.split()):
        call = bound(dtype, (feature,))
        call.dim |= {axis: sizes[0] for axis, sizes in row.dims.items()}
        assert feature in (row.refusal(call) or ""), feature
    for axis, sizes in row.dims.items():
        call = bound(dtype)
        call.dim |= {a: s[0] for a, s in row.dims.items()} | {axis: max(sizes) + 1}
        assert row.refusal(call) == f"{axis}={max(sizes) + 1} not in {{{', '.join(map(str, sizes))}}}"


def _accepted(op: Op, row: Kernel) -> Call:
    """A call that the row accepts: of a case's arguments, with the row's sizes."""
    for shape in parity.shapes(op):
        dims = tuple((axis, sizes[0]) for axis, sizes in row.dims.items())
        for features in parity.feature_sets(op, tuple(row.features.split())):
            with parity.ShapesOnly():
                call = parity.bound(op, *parity.inputs(op, shape, DTYPES[row.dtypes.split()[0]], features, dims))
            if row.refusal(call) is None:
                return call
    raise AssertionError(f"{op.name}: no case for {row}")


def _broken(op: Op, row: Kernel, call: Call) -> Iterator[tuple[Op, Call, str]]:
    """The call and its op with one thing changed that the row needs, each time another, and what that is."""
    held = {n: t.double() if getattr(t, "dtype", 0) == call.dtype else t for n, t in vars(call.arg).items()}
    yield op, replace(call, dtype=torch.float64, arg=SimpleNamespace(**held)), "dtype"
    for axis in sorted(
        row.dims.keys() - op.derive.keys()
    ):  # a derived one says what tensors hold, and so do marked needs
        odd = 1 + max(max(r.dims.get(axis, (0,))) for r in op.kernels)
        both = {"Dv": odd} if axis == "D" and "Dv must equal D" in row.needs else {}
        yield op, replace(call, dim=call.dim | both | {axis: odd}), axis
    for feature in sorted(set(op.features) - set(row.features.split())):
        yield op, replace(call, features=(*call.features, feature)), "features"
    for need in (n for n, ok in row.needs.items() if not hasattr(ok, "of_dtypes")):
        rows = (replace(r, needs=r.needs | {need: lambda c: False}) if need in r.needs else r for r in op.kernels)
        yield replace(op, kernels=tuple(rows)), call, need


@pytest.mark.parametrize(("op", "arch"), sorted({(o.name, a) for o, _, a in ROWS if a != "cpu"}))
def test_a_refusal_names_the_one_need_that_a_call_fails_and_nothing_else(op, arch):
    """Not what another row says of the same call, which would take other sizes, dtypes or features."""
    record, count = OPS[op], 0
    for index, row in enumerate(record.kernels):
        if arch not in row.archs:
            continue
        for changed, call, what in _broken(record, row, _accepted(record, row)):
            refusals = list(changed.kernels[index].reasons(call))
            try:
                assert dispatch.resolve(changed, call, Target(arch)) is not None
                continue  # another row accepts it
            except UnsupportedError as error:
                answers = str(error).removeprefix(f"{op} on {arch}: ").split("; ")
            assert len(refusals) == 1, (what, refusals)
            message = {a.split(": ", 1)[1].split(" not in ")[0] for a in answers}
            assert message == {refusals[0].message.split(" not in ")[0]}, (what, answers)
            count += 1
    assert count >= sum(1 + len(r.dims) for r in record.kernels if arch in r.archs)


def test_a_page_of_one_key_is_named_where_the_head_size_is_right():
    q, cache = torch.ones(1, 2, 64).bfloat16(), torch.ones(9, 1, 1, 64).bfloat16()
    table, length = torch.zeros(1, 9, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    for arch in ("sm90", "sm100"):
        with simulate(arch), pytest.raises(UnsupportedError) as error:
            torch.ops.attnkit.sdpa_decode_paged(q, cache, cache, table, length)
        message = f"sdpa_decode_paged on {arch} (simulated): {arch}: Ps must be a multiple of 16"
        assert str(error.value) == message
