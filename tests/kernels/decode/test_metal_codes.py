"""Decode over caches of E4M3 on Metal: that codes become their numbers, and what crosses the bus."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from torch_attnkit.core import dispatch
from torch_attnkit.core.target import Target
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity import poison, reference_of
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
METAL = Target("metal", simulated=True)
E4M3 = torch.float8_e4m3fn


def run(name: str, args: tuple[Any, ...], **kwargs: Any) -> list[torch.Tensor]:
    """The op's Metal kernel on CPU tensors, with poisoned outputs."""
    op = dispatch.OPS[name]
    values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
    call = op.bind(values)
    outs = [poison(shape, dtype, "cpu") for shape, dtype in op.outputs(call)]
    op.module("mps").build(call, METAL)(*values, *outs)
    return outs


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def placed(t: torch.Tensor, offset: int) -> torch.Tensor:
    """``t`` that begins ``offset`` elements into its memory."""
    return torch.zeros(t.numel() + offset, dtype=t.dtype)[offset:].view(t.shape).copy_(t)


ALL = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize(("columns", "offset"), [(256, 0), (256, 1), (240, 0), (240, 2)])
def test_every_code_of_v_is_its_number(columns: int, offset: int):
    """With a single key the result is its value. 240 columns are read in pairs, others from odd bytes on."""
    v = torch.stack((ALL[:columns], ALL.flip(0)[:columns]))[:, None, None].view(E4M3)  # (2, 1, 1, columns)
    q, k = normal(0, 2, 1, 32, dtype=torch.float32), normal(1, 2, 1, 1, 32).to(E4M3)
    out, _ = run("sdpa_decode", (q, k, placed(v, offset), ints(1, 1)))
    assert torch.equal(out.nan_to_num(500.0), v[:, 0].float().nan_to_num(500.0))


@pytest.mark.parametrize("offset", [0, 3])
def test_every_code_of_k_is_its_number(offset: int):
    """A head for each column: the score of a single key is its LSE. NaN alone is left out, which all sums would be."""
    k = torch.where(ALL & 0x7F == 0x7F, 0, ALL).view(1, 1, 1, 256).view(E4M3)
    q = torch.eye(256)[None]  # (1, 256, 256)
    _, lse = run("sdpa_decode", (q, placed(k, offset), normal(1, 1, 1, 1, 16).to(E4M3), ints(1)), scale=1.0)
    assert torch.equal(lse[0], k.float().flatten())


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_of_k_is_one(code: int):
    k = torch.zeros(1, 1, 3, 32, dtype=torch.uint8)
    k[0, 0, 1, 5] = code
    out, lse = run("sdpa_decode", (normal(0, 1, 2, 32), k.view(E4M3), normal(1, 1, 1, 3, 16).to(E4M3), ints(3)))
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("given", [g for g in itertools.product((False, True), repeat=3) if any(g)])
def test_scales_belong_to_a_sequence_and_a_head(given: tuple[bool, ...]):
    """Each alone and together, of rows that lie apart."""
    room = torch.exp2(normal(7, 3, 2, 5, dtype=torch.float32))
    scales = [room[i, :, :2] if on else None for i, on in enumerate(given)]
    caches = (normal(i, 2, 2, 70, 64).to(E4M3) for i in (1, 2))
    args = (normal(0, 2, 8, 64, dtype=torch.bfloat16), *caches, ints(70, 33), None, None, *scales)
    for kwargs in (dict(), dict(softcap=5.0, scale=0.4)):
        refs = (reference_of(dispatch.OPS["sdpa_decode"], args, kwargs, double=d) for d in (False, True))
        for name, *three in zip(("out", "lse"), run("sdpa_decode", args, **kwargs), *refs, strict=True):
            check(name, *three)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shared", [4, 16])
def test_a_key_is_read_once_in_half_the_bytes(shared: int):
    """For at most 3.1 operations on integers a code more, for all heads that share it."""
    q, k, v = normal(0, 1, 2 * shared, 128), normal(1, 1, 2, 600, 128), normal(2, 1, 2, 600, 128)
    table = torch.arange(38).int()[None]
    pages = (t.transpose(1, 2).reshape(600, 2, 128) for t in (k, v))
    pages = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 8)).view(38, 16, 2, 128) for t in pages]
    for name, caches, rest in (("sdpa_decode", (k, v), ()), ("sdpa_decode_paged", pages, (table,))):
        with metal.counting() as reports:
            run(name, (q, *caches, *rest, ints(600)))
            run(name, (q, *(t.to(E4M3) for t in caches), *rest, ints(600)))
        halfs, _, codes, _ = reports
        for tensor in ("k", "v"):
            assert codes.buffers[tensor] == (k.numel(), 0)
            assert halfs.buffers[tensor] == (2 * k.numel(), 0)
        assert codes.integer - halfs.integer <= 3.1 * 2 * k.numel()
        assert codes.matrix_flops == halfs.matrix_flops and codes.collectives == halfs.collectives


def test_lengths_and_pages_that_lie_stay_inside():
    q, pages = normal(0, 3, 4, 64), normal(1, 5, 16, 2, 64).to(E4M3)
    table = ints(*(7, -3, 2, 1, 0, 1000, 2, 3, 4)).reshape(3, 3)
    with metal.settings(mode="checked", strict=True):
        out, lse = run("sdpa_decode_paged", (q, pages, pages, table, ints(48, 1000, -5)))
    assert out.isfinite().all() and lse[2].eq(-torch.inf).all() and out[2].eq(0).all()
