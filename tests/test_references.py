"""The oracles themselves: right in float64's eyes in every dtype, pure, and what the CPU op returns."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle import compare

CASES = [
    (op, shape, features)
    for op in OPS.values()
    for shape in parity.shapes(op)
    for features in parity.feature_sets(op, tuple(op.features))
]
IDS = [f"{op.name}-{shape}-{'+'.join(features) or 'plain'}" for op, shape, features in CASES]
# A reference computes in float32 and rounds once at the store. 1024 float32 roundings in a row, each at its worst,
# bound what the sums of these small shapes can lose; fp4_moe also rounds its hidden activation to T.
FLOAT32_ROUNDINGS = 1024
STORE_ROUNDINGS = {"fp4_moe": 8}


@pytest.mark.parametrize(("op", "shape", "features"), CASES, ids=IDS)
def test_reference_is_close_to_float64_and_pure(op, shape, features):
    for name in ("f32", "bf16", "f16"):
        args, kwargs = parity.inputs(op, shape, DTYPES[name], features)
        call = parity.bound(op, args, kwargs)
        assert set(features) <= set(call.features), "cases.make must switch on what it is asked for"
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        ref = parity.reference_of(op, args, kwargs, double=False)
        ref64 = parity.reference_of(op, args, kwargs, double=True)
        parity.unchanged(op.name, op, before, args)
        for what, a, b in zip((*_mutated(op), *op.outnames), ref, ref64, strict=True):
            assert a.shape == b.shape
            if not a.dtype.is_floating_point:
                continue  # codes and indices: formats/ and the op's own tests
            assert not a.isnan().any(), what
            finite = a.isfinite() & b.isfinite()
            if not finite.any():
                continue
            x, y = a[finite].double(), b[finite].double()
            roundings = STORE_ROUNDINGS.get(op.name, 1) * torch.finfo(a.dtype).eps / 2
            allowed = (roundings + FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps / 2) * y.abs().max()
            assert (x - y).abs().max() <= allowed, f"{what} in {name}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_op_on_cpu_returns_what_its_plan_says(op):
    for shape in parity.shapes(op):
        for layout in parity.LAYOUTS:
            args, kwargs = parity.inputs(op, shape, torch.float32, ())
            args = tuple(parity.place(a, "cpu", layout) if isinstance(a, torch.Tensor) else a for a in args)
            want = parity.reference_of(op, args, kwargs, double=False)
            want64 = parity.reference_of(op, args, kwargs, double=True)
            out = getattr(torch.ops.attnkit, op.name)(*args, **kwargs)
            got = [
                *parity.mutated(op, args),
                *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out),
            ]
            for name, g, w, w64 in zip((*_mutated(op), *op.outnames), got, want, want64, strict=True):
                compare.check(f"{op.name} {shape} {layout} {name}", g, w, w64)
            call = parity.bound(op, args, kwargs)
            shapes = [(tuple(g.shape), g.dtype) for g in got[len(_mutated(op)) :]]
            assert shapes == op.outputs(call), "the reference returns what dims promises"


def _mutated(op) -> list[str]:
    return [a.name for a in op.parsed.arguments if a.alias_info and a.alias_info.is_write]
