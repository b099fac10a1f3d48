"""rope_kv_cache_write: what it composes, slots it touches and those it must not, and refusals that write nothing."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.formats import kv_cache, rope

A = torch.ops.attnkit
op = A.rope_kv_cache_write
FORMATS = kv_cache.FORMATS


def given(tokens=5, heads=3, dim=192, pairs=32, slots=8, format="fp8", dtype=torch.bfloat16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    angle = 6.28 * torch.rand(tokens, pairs, generator=gen)
    q, kv = (torch.randn(*shape, dim, generator=gen).to(dtype) for shape in ((tokens, heads), (tokens,)))
    size = kv_cache.row_bytes(format, dim, 2 * pairs)
    cache = torch.randint(0, 256, (slots, size), generator=gen, dtype=torch.uint8)
    cache = torch.randn(slots, dim, generator=gen).to(dtype) if format == "none" else cache
    return [q, kv, cache, torch.randperm(slots, generator=gen)[:tokens], angle.cos(), angle.sin()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_norm_rotation_and_kv_cache_write(format, dtype):
    q, kv, cache, slot, cos, sin = args = given(format=format, dtype=dtype)
    want = cache.clone()
    A.kv_cache_write(rope.apply(kv, cos, sin, interleaved=True), want, slot, format=format)
    out = op(*args, eps=1e-3, format=format)
    assert torch.equal(cache, want)
    exact = torch.nn.functional.rms_norm(q.double(), q.shape[-1:], eps=1e-3)
    exact = rope.apply(exact, cos[:, None].double(), sin[:, None].double(), interleaved=True)
    assert float((out.double() - exact).abs().max()) <= 2 * torch.finfo(torch.float32).eps + exact.abs().max() * (
        0.51 * torch.finfo(dtype).eps
    )


def test_a_head_of_zeros_stays_zero_and_a_nan_stays_in_its_head():
    args = given()
    args[0][1, 1], args[0][2, 0, 7] = 0, torch.nan
    out = op(*args, format="fp8")
    assert not bool(out[1, 1].any()) and bool(out[2, 0].isnan().all())
    assert int(out.isnan().sum()) == out.shape[2]


def test_rows_without_a_slot_are_skipped_and_room_between_rows_stays():
    args = given(format="none")
    args[3] = torch.tensor([3, -1, 0, -1, 7])
    memory = torch.randn(8, 200).bfloat16()
    before, args[2] = memory.clone(), memory[:, 4:196]
    op(*args)
    rotated = rope.apply(args[1], args[4], args[5], interleaved=True)
    before[[3, 0, 7], 4:196] = rotated[[0, 2, 4]]
    assert torch.equal(memory, before)


def test_a_cache_of_its_own_gives_rotated_keys():
    q, kv, _, _, cos, sin = given()
    keys = torch.empty_like(kv)
    op(q, kv, keys, torch.arange(5), cos, sin)
    assert torch.equal(keys, rope.apply(kv, cos, sin, interleaved=True))


@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_of_the_mutation(format):
    torch.library.opcheck(op.default, tuple(given(format=format, dtype=torch.float32)), dict(format=format))


REFUSED = [
    (ValueError, "rope_dim must be twice the columns of cos and sin", {}, dict(rope_dim=32)),
    (ValueError, "eps must be positive", {}, dict(eps=0.0)),
    (ValueError, "cache has rows of Rb=", {2: torch.zeros(8, 263, dtype=torch.uint8)}, {}),
    (TypeError, "cache is bf16, accepted with format 'fp8': u8", {2: torch.zeros(8, 264).bfloat16()}, {}),
    (ValueError, r"slot\[1\] is 8, accepted: -1 to 7", {3: torch.tensor([0, 8, 1, 2, 3])}, {}),
    (ValueError, "slot holds 1 more than once", {3: torch.tensor([0, 1, 1, 2, 3])}, {}),
    (ValueError, "rows of cache must not overlap", {2: torch.zeros(1, 260, dtype=torch.uint8).expand(8, 260)}, {}),
    (ValueError, "global_scale is accepted with format 'nvfp4' only", {6: torch.tensor(1.0)}, {}),
    (ValueError, "kv", {1: torch.zeros(4, 192).bfloat16()}, {}),
    (TypeError, "kv", {1: torch.zeros(5, 192)}, {}),
]


@pytest.mark.parametrize(("kind", "message", "changes", "kwargs"), REFUSED)
def test_refusals_name_the_op_and_write_nothing(kind, message, changes, kwargs):
    args = given()
    args = [changes.get(i, a) for i, a in enumerate([*args, None])]
    before = args[2].clone()
    with pytest.raises(kind, match=f"^rope_kv_cache_write: .*{message}"):
        op(*args, **dict(format="fp8") | kwargs)
    assert torch.equal(args[2], before)


def test_gradients_are_refused():
    args = given(dtype=torch.float32)
    args[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="rope_kv_cache_write: q requires a gradient, but the op writes in"):
        op(*args, format="fp8")
    with torch.no_grad():
        op(*args, format="fp8")


def test_autocast_changes_nothing():
    args, again = given(dtype=torch.float32), given(dtype=torch.float32)
    want = op(*args, format="fp8")
    with torch.autocast("cpu", torch.bfloat16):
        got = op(*again, format="fp8")
    assert torch.equal(got, want) and torch.equal(again[2], args[2])
