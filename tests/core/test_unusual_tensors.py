"""Tensors that are not what they look like: negated views, tangents, meta, None, sparse, nested; and index tensors with
steps. Each is computed right or refused with words, by the reference and on the simulated devices."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch.autograd import forward_ad

from torch_attnkit import parity
from torch_attnkit.core import simulate
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES

SIMULATOR = {"metal": "torch_attnkit.sim._metal", "sm90": "torch_attnkit.sim._ptx", "sm100": "torch_attnkit.sim._ptx"}
ALL = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
# One call of every row's op on every arch that can be simulated.
ROWS = [(op, arch) for op in OPS.values() for arch in SIMULATOR if any(arch in row.archs for row in op.kernels)]
EACH = pytest.mark.parametrize(("op", "arch"), ROWS, ids=[f"{op.name}-{arch}" for op, arch in ROWS])


def call(op, full=False, dtype=torch.float32):
    names = list(op.module("cases").PARITY)
    features = parity.feature_sets(op, tuple(op.features))[-1] if full else ()
    args, kwargs = parity.inputs(op, names[min(1, len(names) - 1)], dtype, features)
    return list(args), kwargs, getattr(torch.ops.attnkit, op.name)


def on_row(op, arch):
    """The arguments of a case of the first row that serves ``arch``, with all its features."""
    pytest.importorskip(SIMULATOR[arch])
    index = next(i for i, row in enumerate(op.kernels) if arch in row.archs)
    cases = parity.cases(op, index, arch)
    rank = lambda c: (len(c.features), c.dtype == "f32", c.shape not in ("one", "empty"))
    best = next(filter(parity.accepted, sorted(cases, key=rank, reverse=True)))
    args, kwargs = parity.inputs(op, best.shape, DTYPES[best.dtype], best.features, best.dims)
    return list(args), kwargs, getattr(torch.ops.attnkit, op.name)


def leaves(out):
    return [] if out is None else [out] if isinstance(out, torch.Tensor) else list(out)


def bits(op, args, out):
    found = [*parity.mutated(op, tuple(args)), *leaves(out)]
    return [t.reshape(-1).view(torch.uint8).tolist() for t in found]


def copies(args):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def negated(t: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a view of memory that holds the opposite ones."""
    view = torch._neg_view(-t)
    assert view.is_neg()
    return view


def differentiable(op, args):
    return [i for i, n in enumerate(op.argnames[: len(args)]) if n in op.tensors and n not in op.mutated
            and isinstance(args[i], torch.Tensor) and args[i].dtype in (torch.float32, torch.bfloat16)]  # fmt: skip


@EACH
@pytest.mark.sample(35)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_negated_views_are_read_with_their_sign(op, arch, mode):
    args, kwargs, run = on_row(op, arch)
    with simulate(arch), mode():
        given = copies(args)
        want = bits(op, given, run(*given, **kwargs))
        for i in differentiable(op, args):
            changed = copies(args)
            changed[i] = negated(args[i])
            assert bits(op, changed, run(*changed, **kwargs)) == want, op.argnames[i]


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.mutated], ids=lambda op: op.name)
def test_a_negated_view_is_not_written_to(op):
    args, kwargs, run = call(op)
    for name in op.mutated:
        i = op.argnames.index(name)
        changed = copies(args)
        changed[i] = negated(args[i])
        with pytest.raises(ValueError, match=f"^{op.name}: {name} is a negated view, accepted: a tensor whose memory"):
            run(*changed, **kwargs)
        assert torch.equal(changed[i], args[i])


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", [None, "metal"])
@ALL
def test_forward_derivatives_are_refused(op, arch):
    """The transform, and dual numbers made by hand; a dual number elsewhere does not matter."""
    args, kwargs, run = call(op)
    if arch and all(arch not in row.archs for row in op.kernels):
        return
    if arch:
        args, kwargs, run = on_row(op, arch)
    with simulate(arch) if arch else contextlib.nullcontext():
        for i in differentiable(op, args):
            message = rf"^{op.name}: {op.argnames[i]} has a tangent, but the op has no forward derivative"

            def of_one(x, i=i):
                out = run(*copies(args[:i]), x, *copies(args[i + 1 :]), **kwargs)
                return leaves(out)[0] if leaves(out) else x

            with pytest.raises(NotImplementedError, match=message):
                torch.func.jvp(of_one, (args[i],), (torch.ones_like(args[i]),))
            with forward_ad.dual_level():
                of_one(args[i])
                with pytest.raises(NotImplementedError, match=message):
                    of_one(forward_ad.make_dual(args[i], torch.ones_like(args[i])))


@ALL
def test_gradient_transforms_are_refused_by_name(op):
    args, kwargs, run = call(op)
    for i in differentiable(op, args):

        def total(x, i=i):
            out = [o for o in leaves(run(*copies(args[:i]), x, *copies(args[i + 1 :]), **kwargs))]
            return sum((o.float().sum() for o in out), x.sum())

        with pytest.raises(NotImplementedError, match=rf"^{op.name}: {op.argnames[i]} requires a gradient, but the op"):
            torch.func.grad(total)(args[i])


@ALL
def test_vmap_maps_over_the_op_below_a_gradient_too(op):
    args, kwargs, run = call(op)
    floats = differentiable(op, args)
    if not floats or op.mutated:
        return
    i = floats[0]
    mapped = torch.vmap(lambda x: run(*args[:i], x, *args[i + 1 :], **kwargs), in_dims=0)
    out = leaves(mapped(torch.stack([args[i], args[i]]).requires_grad_()))
    for got, want in zip(out, leaves(run(*args, **kwargs)), strict=True):
        assert torch.equal(got[1].nan_to_num(), want.nan_to_num()) if got.is_floating_point() else True
        if got.requires_grad and got.numel() and not op.backward:
            with pytest.raises(NotImplementedError, match=f"{op.name} has no backward"):
                got.sum().backward(retain_graph=True)


@pytest.mark.sample(3)
@ALL
def test_meta_tensors_give_meta_outputs_of_the_right_kind_and_are_validated(op):
    for shape in parity.shapes(op):
        for features in parity.feature_sets(op, tuple(op.features)):
            args, kwargs = parity.inputs(op, shape, torch.bfloat16, features)
            run = getattr(torch.ops.attnkit, op.name)
            meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
            real = leaves(run(*copies(args), **kwargs))
            for mode in (torch.enable_grad, torch.inference_mode):
                with mode():
                    for got, want in zip(leaves(run(*meta, **kwargs)), real, strict=True):
                        assert got.is_meta
                        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    args, kwargs, run = call(op, full=True)
    for i, name in enumerate(op.tensors):
        if args[i] is not None and not op.spec(name).batch:
            meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
            with pytest.raises(ValueError, match=rf"^{op.name}: {name} must be "):
                run(*meta[:i], meta[i][None], *meta[i + 1 :], **kwargs)
            if len([a for a in args if isinstance(a, torch.Tensor)]) > 1:
                with pytest.raises(ValueError, match=rf"^{op.name}: .* is on (meta|cpu), but "):
                    run(*meta[:i], args[i], *meta[i + 1 :], **kwargs)


def test_meta_tensors_are_held_to_rules_and_strides():
    args, kwargs, run = call(OPS["sdpa_decode"])
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    with pytest.raises(ValueError, match=r"^sdpa_decode: window must be -1"):
        run(*meta, **(kwargs | {"window": -2}))
    with pytest.raises(ValueError, match=r"^sdpa_decode: q must be contiguous in its last dimension"):
        run(meta[0].mT.contiguous().mT, *meta[1:], **kwargs)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@ALL
def test_none_for_a_tensor_names_it(op, mode):
    for i, name in enumerate(op.tensors):
        args, kwargs, run = call(op, full=True)
        if op.defaults.get(name, ...) is None:
            continue
        args[i] = None
        message = rf"^{op.name}: {name} is None, accepted: a dense"
        if mode is torch.inference_mode and not any(isinstance(a, torch.Tensor) for a in args):
            message = f"attnkit::{op.name}"  # torch knows no backend to ask
        with mode(), pytest.raises((TypeError, NotImplementedError), match=message):
            run(*args, **kwargs)


def odd(t: torch.Tensor) -> dict[str, torch.Tensor]:
    if t.dtype.is_floating_point and t.dtype.itemsize == 1:
        return {}  # torch makes none of them of 8-bit floats
    made = {"sparse_coo": t.to_sparse(), "nested": torch.nested.nested_tensor([t, t])}
    if t.dim() == 2:
        made["sparse_csr"] = t.to_sparse_csr()
    if t.dtype == torch.float32:
        made["_mkldnn"] = t.to_mkldnn()
        made["quantized"] = torch.quantize_per_tensor(t, 0.5, 0, torch.qint8)
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@ALL
def test_tensors_that_are_not_dense_are_named(op, mode):
    for i, name in enumerate(op.tensors):
        args, kwargs, run = call(op, full=True)
        if args[i] is None or args[i].dim() == 0 or args[i].numel() == 0:
            continue
        for kind, tensor in odd(args[i]).items():
            with mode(), pytest.raises(TypeError, match=rf"^{op.name}: {name} is {kind}, accepted: a dense"):
                run(*args[:i], tensor, *args[i + 1 :], **kwargs)


def test_jagged_and_zero_tensors_are_refused():
    args, kwargs, run = call(OPS["sdpa_decode"])
    jagged = torch.nested.nested_tensor([args[0][0], args[0][0]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^sdpa_decode: q is nested, accepted: a dense"):
        run(jagged, *args[1:], **kwargs)
    pytest.importorskip(SIMULATOR["metal"])
    args, kwargs, run = on_row(OPS["sdpa_decode"], "metal")
    with simulate("metal"), pytest.raises(ValueError, match=r"^sdpa_decode: q must be contiguous"):
        run(torch._efficientzerotensor(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs)  # it has no memory


@ALL
def test_numbers_that_float32_cannot_hold_are_refused(op):
    for argument in op.parsed.arguments:
        for value in (float("inf"), -float("inf"), 1e39, 1e-40):
            if "float" in str(argument.type):
                args, kwargs, run = call(op)
                with pytest.raises(
                    ValueError, match=re.escape(f"{op.name}: {argument.name} is {value}, accepted: a number")
                ):
                    run(*args, **(kwargs | {argument.name: value}))


def stepped(t: torch.Tensor) -> torch.Tensor:
    """The same integers, every third of memory that is wrong elsewhere; rows apart too."""
    buffer = torch.full((*(n + 1 for n in t.shape[:-1]), 3 * t.shape[-1]), -77, dtype=t.dtype)
    view = buffer[tuple(slice(0, n) for n in t.shape[:-1])][..., 1::3]
    return view.copy_(t)


def indices(op, args):
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype in (torch.int32, torch.int64)]


@pytest.mark.sample(3)
@ALL
def test_index_tensors_may_have_steps_between_their_elements(op):
    run = getattr(torch.ops.attnkit, op.name)
    for features in parity.feature_sets(op, tuple(op.features)):
        for shape in parity.shapes(op):
            args, kwargs = parity.inputs(op, shape, torch.float32, features)
            if not indices(op, args):
                continue
            before = copies(args)
            want = bits(op, args, run(*args, **kwargs))
            for i in indices(op, args):
                changed = copies(before)
                changed[i] = stepped(args[i])
                assert bits(op, changed, run(*changed, **kwargs)) == want, f"{shape} {op.argnames[i]}"


@pytest.mark.sample(3)
@EACH
def test_index_tensors_may_have_steps_on_devices(op, arch):
    args, kwargs, run = on_row(op, arch)
    found = indices(op, args)
    if not found:
        routers = {"route_softmax", "route_sqrt_softplus"}
        heads = {"inverse_rope_fp4", "grouped_output_projection", "linear_decode"}
        norms = {"gated_rmsnorm", "gated_rmsnorm_backward"}
        without = {"merge_partials", *norms, *routers, *heads, *(n for n in OPS if n.endswith("quantize"))}
        assert op.name in without, "these have no index tensors"
        return
    with simulate(arch):
        first = own(op, args)
        want = bits(op, first, run(*first, **kwargs))
        for i in found:
            for view in (stepped(args[i]), args[i][:1].expand_as(args[i]) if args[i].dim() == 1 else None):
                if view is not None and torch.equal(view, args[i]):
                    changed = own(op, args)
                    changed[i] = view
                    assert bits(op, changed, run(*changed, **kwargs)) == want, op.argnames[i]
        for _ in range(2):  # a plan's second call
            every = own(op, [stepped(a) if i in found else a for i, a in enumerate(args)])
            assert bits(op, every, run(*every, **kwargs)) == want


def own(op, args):
    """``args`` with copies of what the op writes in place."""
    return [a.clone() if name in op.mutated else a for name, a in zip(op.argnames, args, strict=False)]


def otherwise(op, args):
    """Other ways to give the numbers of small tensors: (place, the tensor in another way, in the usual one)."""
    for i, name in enumerate(op.tensors):
        spec = op.spec(name)
        if i >= len(args) or args[i] is None or args[i].dtype != DTYPES.get(spec.dtypes[0]):
            continue
        for dtype in spec.cast:
            other = args[i].to(DTYPES[dtype])
            yield i, other, other.to(args[i].dtype)
        if spec.spread and args[i].numel():
            one = args[i].flatten()[0]
            for form in (one.clone(), one.expand(args[i].shape), args[i][:1].clone().expand_as(args[i])):
                yield i, form, form.expand_as(args[i]).clone()


TAKEN = [op for op in OPS.values() if any(op.spec(name).small for name in op.tensors)]


def test_what_frameworks_have_is_taken():
    """Indices of int64 wherever there are some; sinks and biases of 16 bits; scales that are one number or expanded."""
    for op in OPS.values():
        for name in op.tensors:
            spec = op.spec(name)
            assert "i32" not in spec.dtypes or "i64" in (*spec.dtypes, *spec.cast), (op.name, name)
            assert name not in ("sink", "bias") or "T" in spec.dtypes or spec.cast == ("bf16", "f16")
            assert spec.spread == (name in ("q_scale", "k_scale", "v_scale", "w13_global", "w2_global")) or (
                op.name.startswith("indexer")  # a scale a row
            )
    assert len(TAKEN) == 19


@pytest.mark.parametrize("op", TAKEN, ids=lambda op: op.name)
def test_small_tensors_of_other_dtypes_and_forms_are_the_same_numbers(op):
    """By the definition and on the CPU's rows; fake and meta tensors say the same."""
    for features in {(), *parity.all_features(op, tuple(op.features))}:
        for shape in list(parity.shapes(op))[:2]:
            args, kwargs = parity.inputs(op, shape, torch.float32, features)
            run = getattr(torch.ops.attnkit, op.name)
            for i, other, same in otherwise(op, args):
                usual = own(op, [*args[:i], same, *args[i + 1 :]])
                want = bits(op, usual, run(*usual, **kwargs))
                for _ in range(2):
                    changed = own(op, [*args[:i], other, *args[i + 1 :]])
                    got = run(*changed, **kwargs)
                    assert bits(op, changed, got) == want, f"{shape} {op.argnames[i]} {other.dtype}"
                meta = run(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in changed), **kwargs)
                kinds = [[(t.shape, t.dtype) for t in leaves(out)] for out in (meta, got)]
                assert kinds[0] == kinds[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("op", "arch"), [(op, a) for op, a in ROWS if op in TAKEN], ids=lambda x: getattr(x, "name", x)
)
def test_small_tensors_of_other_dtypes_and_forms_are_the_same_numbers_on_devices(op, arch):
    args, kwargs, run = on_row(op, arch)
    with simulate(arch):
        for i, other, same in otherwise(op, args):
            usual = own(op, [*args[:i], same, *args[i + 1 :]])
            want = bits(op, usual, run(*usual, **kwargs))
            for _ in range(2):  # a plan's second call
                changed = own(op, [*args[:i], other, *args[i + 1 :]])
                assert bits(op, changed, run(*changed, **kwargs)) == want, f"{op.argnames[i]} {other.dtype}"


def test_opcheck_takes_them():
    op = OPS["sdpa_decode_paged"]
    args, kwargs = parity.inputs(op, "ragged", torch.float32, ("sink", "scales"))
    for i, other, _ in otherwise(op, args):
        args = (*args[:i], other, *args[i + 1 :])
    assert args[3].dtype == args[4].dtype == torch.int64 and args[5].dtype == torch.float16
    torch.library.opcheck(torch.ops.attnkit.sdpa_decode_paged.default, args, kwargs)


def test_what_no_kernel_reads_is_refused_with_all_that_is_taken():
    args, kwargs, run = call(OPS["sdpa_decode"], full=True)
    with pytest.raises(TypeError, match="^sdpa_decode: kv_len is f32, accepted: i32, i64$"):
        run(*args[:3], args[3].float(), *args[4:], **kwargs)
    with pytest.raises(TypeError, match="^sdpa_decode: sink is f64, accepted: f32, bf16, f16$"):
        run(*args[:4], args[4].double(), *args[5:], **kwargs)
    with pytest.raises(ValueError, match=r"^sdpa_decode: k_scale must be \(B, Hkv\) or \(\), got shape \(\d,\)$"):
        run(*args[:7], args[7][0], *args[8:], **kwargs)
    with pytest.raises(ValueError, match=r"^sdpa_decode: kv_len\[0\] is 4294967301, accepted: 0 to"):
        run(*args[:3], args[3].long() * 0 + 2**32 + 5, *args[4:], **kwargs)


def test_one_length_for_all_sequences_by_expand():
    q, kv = torch.randn(3, 4, 64), torch.randn(3, 2, 9, 64)
    one = torch.tensor([7], dtype=torch.int32)
    for arch in (None, "metal"):
        if arch:
            pytest.importorskip(SIMULATOR[arch])
        with simulate(arch) if arch else contextlib.nullcontext():
            got = torch.ops.attnkit.sdpa_decode(q, kv, kv, one.expand(3))[0]
            assert torch.equal(got, torch.ops.attnkit.sdpa_decode(q, kv, kv, one.repeat(3))[0])


def test_token_ids_may_be_a_column_of_a_table():
    logits, ids = torch.randn(4, 8), torch.randint(0, 11, (4, 5))
    table = torch.randint(0, 8, (11, 3))
    got = torch.ops.attnkit.route_hash(logits, ids[:, 2], table)
    assert torch.equal(got[1], table[ids[:, 2].clone()].int())
