"""The oracles themselves: float32 inside and one rounding at the store, pure, and what the CPU op returns."""

from __future__ import annotations

import contextlib
import math
from unittest.mock import patch

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Call
from torch_attnkit.oracle import attention, compare
from torch_attnkit.parity import judge

CASES = [
    (op, shape, features)
    for op in OPS.values()
    for shape in parity.shapes(op)
    for features in parity.feature_sets(op, tuple(op.features))
]
IDS = [f"{op.name}-{shape}-{'+'.join(features) or 'plain'}" for op, shape, features in CASES]
# A sum of n terms in float32 errs by sqrt(n) roundings, up to a small factor that the probability of more sets: with 4
# it is below 2 exp(-8) a sum (N. Higham, T. Mary, SIAM J. Sci. Comput. 41, 2019). No element passes
# through more sums than one along each axis of the call.
CONFIDENCE = 4


def terms(call: Call) -> int:
    """The terms of the sums along all axes of a call; keys that lie in pages are an axis as long as these together."""
    size = call.dim
    return sum(size.values()) + size.get("Mp", 0) * size.get("Ps", size.get("Sk", 0))


def largest(op, what: str, exact: torch.Tensor, args: tuple) -> torch.Tensor:
    """The largest number in the sums that the result is made of: its own largest, unless they cancel.

    They do in dy of a row of one element: h r - h r (y r)^2 with h = grad w silu(z), where y r is 1 but for epsilon.
    """
    if (op.name, what) != ("gated_rmsnorm_backward", "dy") or args[1].shape[-1] > 1:
        return exact.abs().max()
    grad, y, z, w = (a.double() for a in args)
    return (grad * w * torch.nn.functional.silu(z) / y).abs().max()


def check_float32(op, shape: str, features: tuple[str, ...]) -> None:
    """In float32 the reference is as close to float64 as sums of that many terms are. What it models of tensor cores
    that keep fewer bits is left out."""
    args, kwargs = parity.inputs(op, shape, torch.float32, features)
    call = parity.bound(op, args, kwargs)
    assert set(features) <= set(call.features), "cases.make must switch on what it is asked for"
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with patch.object(judge, "narrow_products", contextlib.nullcontext):
        ref, ref64 = (parity.reference_of(op, args, kwargs, double=d) for d in (False, True))
    parity.unchanged(op.name, op, before, args)
    for what, a, b in zip((*_mutated(op), *op.outnames), ref, ref64, strict=True):
        assert a.shape == b.shape
        if a.dtype != torch.float32:
            continue  # codes and indices: formats/ and the op's own tests; a chosen dtype: check_one_rounding
        assert not a.isnan().any() and torch.equal(a.isfinite(), b.isfinite()), what
        x, y = a[a.isfinite()].double(), b[a.isfinite()].double()
        if len(x):
            allowed = (
                CONFIDENCE * math.sqrt(terms(call)) * torch.finfo(torch.float32).eps / 2 * largest(op, what, y, args)
            )
            assert (x - y).abs().max() <= allowed, f"{what}: {(x - y).abs().max():.3g} is over {allowed:.3g}"


def check_one_rounding(op, shape: str, features: tuple[str, ...], dtype: torch.dtype, monkeypatch) -> None:
    """In half precision it gives, bit for bit, what it gives in float32 on the same numbers, rounded once."""
    args, kwargs = parity.inputs(op, shape, dtype, features)
    if op.name == "gated_delta_rule":  # tensor cores take its state in the model dtype
        monkeypatch.setattr(op.module("reference"), "narrow_operands", lambda dtype: False)
    ref = parity.reference_of(op, args, kwargs, double=False)
    widened = tuple(
        a.float() if isinstance(a, torch.Tensor) and a.dtype == dtype and dtype in op.spec(n).model() else a
        for n, a in zip(op.argnames, args, strict=False)
    )
    wide = kwargs | ({"dtype": torch.float32} if "dtype" in op.argnames else {})
    with monkeypatch.context() as patch:
        if op.name == "fp4_moe" and kwargs["activations"] == "none":  # its hidden activation is in the model dtype
            module = op.module("reference")
            swiglu = module._swiglu
            patch.setattr(module, "_swiglu", lambda *a: swiglu(*a).to(dtype).float())
        if op.name == "sparse_fmha_with_swa":  # its encoded keys stand for numbers in the model dtype
            formats = op.module("reference").kv_cache
            decode = formats.decode_rows
            patch.setattr(formats, "decode_rows", lambda *a: decode(*a[:-1], dtype).float())
        ref32 = parity.reference_of(op, widened, wide, double=False)
    for what, a, b in zip((*_mutated(op), *op.outnames), ref, ref32, strict=True):
        if a.dtype.is_floating_point:
            assert not a.isnan().any(), what
            assert torch.equal(a, b.to(a.dtype)), f"{what} in {dtype}"


@pytest.mark.sample(3)
@pytest.mark.parametrize(("op", "shape", "features"), CASES, ids=IDS)
def test_reference_sums_in_float32_rounds_once_and_is_pure(op, shape, features, monkeypatch):
    check_float32(op, shape, features)
    for dtype in (torch.bfloat16, torch.float16):
        check_one_rounding(op, shape, features, dtype, monkeypatch)


def rounded(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == torch.float64 else t.bfloat16().to(t.dtype)


def weights_in_bf16(patch: pytest.MonkeyPatch) -> None:
    exp = torch.Tensor.exp
    patch.setattr(torch.Tensor, "exp", lambda t: rounded(exp(t)))


def products_in_bf16(patch: pytest.MonkeyPatch) -> None:
    einsum = torch.einsum
    patch.setattr(torch, "einsum", lambda how, a, b: rounded(einsum(how, rounded(a), rounded(b))))


def of_bf16_inputs_alone(mutation, patch: pytest.MonkeyPatch, module) -> None:
    """The mutation where a call's q is bf16, as a reference has it that keeps to the dtype of its tensors."""
    attend = attention.attend

    def mutated(q, *args, **kwargs):
        with pytest.MonkeyPatch.context() as inner:
            if q.dtype == torch.bfloat16:
                mutation(inner)
            return attend(q, *args, **kwargs)

    patch.setattr(module, "attend", mutated)


@pytest.mark.parametrize("mutation", [weights_in_bf16, products_in_bf16])
@pytest.mark.parametrize("name", ["flash_attention", "sdpa_decode", "sdpa_multi"])
def test_a_reference_that_rounds_more_often_is_caught(name, mutation, monkeypatch):
    op = OPS[name]
    for shape in op.module("cases").PARITY:
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="is over"):
            mutation(patch)
            check_float32(op, shape, ())
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="in torch.bfloat16"):
            of_bf16_inputs_alone(mutation, patch, op.module("reference"))
            check_one_rounding(op, shape, (), torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_op_on_cpu_returns_what_its_plan_says(op):
    for shape in parity.shapes(op):
        for layout in parity.LAYOUTS:
            args, kwargs = parity.inputs(op, shape, torch.float32, ())
            args = tuple(parity.embed(a, "cpu", layout) if isinstance(a, torch.Tensor) else a for a in args)
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
