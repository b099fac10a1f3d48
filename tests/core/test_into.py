"""Forms of ops that write into given tensors: what they write, refuse, and are to torch.compile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_attnkit
from torch_attnkit import parity
from torch_attnkit.core import into, native
from torch_attnkit.core.dispatch import OPS

FORMS = [name for name, op in OPS.items() if into.form_of(op) is not None]


def call_of(name):
    """A parity case of the CPU's, its result, and tensors of NaN for it."""
    op = OPS[name]
    case = parity.cases(op, 0, op.kernels[0].archs[0], covering=True)[0]
    args, kwargs = parity.arguments(case)
    want = getattr(torch.ops.attnkit, name)(*args, **kwargs)
    want = want if isinstance(want, tuple) else (want,)
    outs = {n: torch.full_like(t, 77) for n, t in zip(op.outnames, want, strict=True)}
    return args, kwargs, want, outs


def paged(**more):
    q = torch.randn(2, 8, 64)
    k, v = torch.randn(2, 10, 16, 2, 64)
    table = torch.tensor([[3, 7, 0], [3, 1, -1]], dtype=torch.int32)
    return dict(q=q, k_cache=k, v_cache=v, block_table=table, kv_len=torch.tensor([40, 20], dtype=torch.int32)) | more


def outs_of(q):
    return dict(out=torch.full_like(q, torch.nan), lse=torch.full(q.shape[:2], torch.nan))


def test_what_has_a_form_and_what_does_not():
    assert {"sdpa_decode_paged", "flash_attention_paged", "fp4_moe", "sdpa_decode"} <= set(FORMS)
    assert not {"kv_cache_write", "paged_kv_cache_write", "flash_attention"} & set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_writes_what_its_op_returns(name):
    args, kwargs, want, outs = call_of(name)
    assert getattr(torch.ops.attnkit, name + into.SUFFIX)(*args, **kwargs, **outs) is None
    for got, wanted in zip(outs.values(), want, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda g: g | dict(out=g["out"][:1]), r"out has shape \(1, 8, 64\), accepted: \(2, 8, 64\)"),
        (lambda g: g | dict(out=g["out"].half()), "out is f16, accepted: f32"),
        (lambda g: g | dict(out=g["q"]), "out shares memory with q, accepted: memory of its own"),
        (lambda g: g | dict(lse=g["out"].view(-1)[:16].view(2, 8)), "lse shares memory with out"),
        (lambda g: g | dict(out=g["out"].mT.contiguous().mT), r"out has strides \(512, 1, 8\), accepted: a contiguous"),
        (
            lambda g: g | dict(out=torch.empty(2 * 8 * 64 + 1)[1:].view(2, 8, 64)),
            "out starts at 4 past a multiple of 16 bytes",
        ),
        (lambda g: g | dict(q=g["q"].requires_grad_()), "writes in place and has no backward"),
    ],
)
def test_refusals_come_before_anything_is_written(change, error):
    given = paged()
    given |= outs_of(given["q"])
    before = given["out"].clone()
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=error):
        torch.ops.attnkit.sdpa_decode_paged_out(**change(given))
    assert torch.equal(given["out"].view(torch.int32), before.view(torch.int32))


def test_compiled_the_given_tensor_is_written():
    given = paged()
    want, _ = torch.ops.attnkit.sdpa_decode_paged(**given)

    def attend(q, outs):
        torch.ops.attnkit.sdpa_decode_paged_out(**given | dict(q=q * 2), **outs)
        return outs["out"] + 1

    outs = outs_of(given["q"])
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(given["q"] / 2, outs)
    assert torch.equal(got, want + 1) and torch.equal(outs["out"], want)


def test_a_form_counts_as_its_op():
    given = paged()
    counts = []
    for call in (
        torch.ops.attnkit.sdpa_decode_paged,
        partial(torch.ops.attnkit.sdpa_decode_paged_out, **outs_of(given["q"])),
    ):
        with FlopCounterMode(display=False) as counter:
            call(**given)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_fake_tensors_are_checked_too():
    given = {n: t.to("meta") for n, t in paged().items()}
    outs = {n: t.to("meta") for n, t in outs_of(paged()["q"]).items()}
    assert torch.ops.attnkit.sdpa_decode_paged_out(**given, **outs) is None
    with pytest.raises(TypeError, match="out is f16, accepted: f32"):
        torch.ops.attnkit.sdpa_decode_paged_out(**given, **outs | dict(out=outs["out"].half()))


@pytest.mark.simulator
def test_the_kernels_of_a_device_write_it():
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    given = {n: t.bfloat16() if t.is_floating_point() else t for n, t in paged().items()}
    outs = outs_of(given["q"])
    with torch_attnkit.simulate("sm90"):
        want = torch.ops.attnkit.sdpa_decode_paged(**given)
        torch.ops.attnkit.sdpa_decode_paged_out(**given, **outs)
        with native.off():
            assert torch.ops.attnkit.sdpa_decode_paged_out(**given, **outs) is None
    assert torch.equal(outs["out"], want[0]) and torch.equal(outs["lse"], want[1])
