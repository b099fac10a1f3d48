"""What torch demands of an operator: schema, fake tensors, autograd, AOT; and torch.compile without graph breaks."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS

_UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # torch's all


def _call(op, shape: str, features: tuple[str, ...], layout: str, dtype=torch.float32):
    args, kwargs = parity.inputs(op, shape, dtype, features)
    return tuple(parity.embed(a, "cpu", layout) if isinstance(a, torch.Tensor) else a for a in args), kwargs


def _shapes(op) -> list[str]:
    """One ordinary shape and the empty one."""
    return [*op.module("cases").PARITY][:1] + [n for n in parity.shapes(op) if "empty" in n or n == "no-batch"][:1]


def _tensors(out) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(out) if t is not None]


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        pytest.param(op, layout, id=f"{op.name}-{layout}", marks=[] if (i + j) % 2 == 0 else pytest.mark.proof)
        for i, op in enumerate(OPS.values())
        for j, layout in enumerate(parity.LAYOUTS)
    ],
)
def test_opcheck(op, layout):
    for shape in _shapes(op):
        for features in (sets := parity.feature_sets(op, tuple(op.features)))[:1] + sets[-1:]:
            # opcheck cannot clone an embedded view without elements
            args, kwargs = _call(op, shape, features, "contiguous" if shape in ("empty", "no-batch") else layout)
            # torch's check of what is written compares sums, which E4M3 has not.
            coded = any(t.dtype == torch.float8_e4m3fn for t in parity.mutated(op, args))
            utils = [u for u in _UTILS if not (coded and u == "test_schema")]
            torch.library.opcheck(getattr(torch.ops.attnkit, op.name).default, args, kwargs, test_utils=utils)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_fake_tensors_match_the_real_outputs(op):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for shape in parity.shapes(op):
        args, kwargs = _call(op, shape, parity.feature_sets(op, tuple(op.features))[-1], "contiguous")
        real = getattr(torch.ops.attnkit, op.name)(*args, **kwargs)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fake = getattr(torch.ops.attnkit, op.name)(*fakes, **kwargs)
        for r, f in zip(_tensors(real), _tensors(fake), strict=True):
            assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride()), shape


@pytest.mark.parametrize("op", [op for op in OPS.values() if not (op.mutated or op.backward)], ids=lambda op: op.name)
def test_backward_raises_and_names_the_op(op):
    args, kwargs = _call(op, _shapes(op)[0], (), "contiguous")
    floats = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.float32]
    if not floats:
        assert op.name in {"nvfp4_dequantize", "mxfp4_dequantize", "kv_cache_gather"}, "only byte inputs"
        return
    for a in floats:
        a.requires_grad_()
    out = getattr(torch.ops.attnkit, op.name)(*args, **kwargs)
    differentiable = [o for o in _tensors(out) if o.dtype.is_floating_point and o.numel()]
    for o in differentiable:
        with pytest.raises(NotImplementedError, match=f"{op.name} has no backward"):
            o.sum().backward(retain_graph=True)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.mutated], ids=lambda op: op.name)
def test_mutating_op_refuses_gradients_and_bumps_the_version(op):
    args, kwargs = _call(op, _shapes(op)[0], (), "contiguous")
    written = parity.mutated(op, args)[0]
    version = written._version
    getattr(torch.ops.attnkit, op.name)(*args, **kwargs)
    assert written._version > version
    args[0].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{op.name}: .* requires a gradient"):
        getattr(torch.ops.attnkit, op.name)(*args, **kwargs)
    with torch.no_grad():
        getattr(torch.ops.attnkit, op.name)(*args, **kwargs)


def _block(inputs):
    """Every op once, each on its own inputs, with plain torch before and after."""
    results = []
    for name, (args, kwargs) in inputs.items():
        op = OPS[name]
        first = args[0] + 0 if args[0].dtype.is_floating_point else args[0]
        written = [args[i].clone() if a.alias_info else args[i] for i, a in enumerate(op.parsed.arguments[: len(args)])]
        out = getattr(torch.ops.attnkit, name)(first, *written[1:], **kwargs)
        leaves = list(out) if isinstance(out, tuple) else [out] if out is not None else []
        leaves += [written[op.argnames.index(name)] for name in op.mutated]
        results += [o * 2 if o.dtype.is_floating_point else o for o in leaves]
    return results


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.proof)])
def test_compile_a_block_that_calls_every_op(backend):
    """fullgraph=True refuses graph breaks; dynamic=True makes every size symbolic."""
    compiled = torch.compile(_block, backend=backend, fullgraph=True, dynamic=True)
    inputs = {op.name: _call(op, _shapes(op)[0], (), "contiguous") for op in OPS.values()}
    torch._dynamo.reset()
    with torch.no_grad():
        for got, want in zip(compiled(inputs), _block(inputs), strict=True):
            assert (
                torch.equal(got.nan_to_num(), want.nan_to_num())
                if want.dtype.is_floating_point
                else torch.equal(got, want)
            )
