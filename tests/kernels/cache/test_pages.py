"""The kernel that writes keys and values into pages, in the simulators: layouts, hostile slots, shared memory."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.core.dispatch import OPS

from .checking import checked

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.paged_kv_cache_write
CASES = OPS["paged_kv_cache_write"].module("cases")
HOSTILE = (-(2**31), -2, -1, 5 * 16, 5 * 16 + 1, 2**31 - 1)  # of five pages of 16 keys
ARCHS = ("sm90", "metal")


def given(case="joined", dtype=torch.bfloat16, features=(), **changes):
    args, _ = CASES.make(CASES.PARITY[case] | changes, dtype, features, torch.Generator().manual_seed(3))
    return list(args)


def copied(args):
    """The same with caches of their own, still halves of one buffer."""
    k, v = args[2:4]
    kv = torch.cat([k, v], -1).clone()
    return [*args[:2], *kv.split((k.shape[-1], v.shape[-1]), -1), *args[4:]]


@pytest.mark.parametrize("arch", ARCHS)
def test_slots_outside_of_the_cache_are_passed_over(arch):
    args = given()
    args[4] = torch.tensor([*HOSTILE[:5], 37, HOSTILE[5]], dtype=torch.int64)
    want = copied(args)
    op(args[0][5:6], args[1][5:6], *want[2:4], args[4][5:6])
    got = copied(args)
    with checked(arch):
        op(*got)
    assert torch.equal(got[2], want[2]) and torch.equal(got[3], want[3])


@pytest.mark.parametrize("arch", ARCHS)
def test_tokens_that_lie_in_the_cache_are_read_before_they_are_overwritten(arch):
    args = given("apart", R=3)
    pages = args[2]
    args[0], args[4] = pages[0, :3], torch.tensor([1, 2, 3], dtype=torch.int32)  # each would overwrite the next
    want = pages[0, :3].clone()
    with checked(arch):
        op(*args)
    assert torch.equal(pages[0, 1:4], want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("odd", ["key", "cache"])
def test_addresses_that_vectors_do_not_reach(arch, odd):
    """The plan knows strides, not where memory begins."""
    args = given("joined")
    if odd == "key":
        held = torch.zeros(args[0].numel() + 1, dtype=args[0].dtype)[1:].view(args[0].shape)
        args[0] = held.copy_(args[0])
    else:
        size = args[2].numel() + args[3].numel()
        held = torch.zeros(size + 1, dtype=args[2].dtype)[1:].view(*args[2].shape[:3], 128)
        args[2:4] = held.split((64, 64), -1)
    want = copied(args)
    op(*want)
    with checked(arch):
        op(*args)
    assert torch.equal(args[2], want[2]) and torch.equal(args[3], want[3])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scales", ["none", "one", "heads"])
def test_codes_are_those_that_decode_reads(arch, scales):
    """Quotients rounded to nearest, ties to even, and 448 for what is more."""
    args = given("e4m3", dtype=torch.float16)
    args[0][0, 0, :8] = torch.tensor([0, -0.0, 448, 1e4, -6e4, 2**-10, 3 * 2**-10, 17.0])
    if scales != "none":
        args[5] = torch.tensor(0.37) if scales == "one" else torch.tensor([0.37, 21.0])
        args[6] = torch.tensor(1.9) if scales == "one" else torch.tensor([1.9, 0.03])
    with checked(arch):
        op(*args)
    for new, cache, scale in zip(args[:2], args[2:4], args[5:7], strict=True):
        x = new.float() if scale is None else new.float() / scale.view(-1, 1)
        codes = x.clamp(-448, 448).to(torch.float8_e4m3fn)
        for t, slot in enumerate(args[4].tolist()):
            if slot >= 0:
                assert torch.equal(cache[slot // 16, slot % 16].view(torch.uint8), codes[t].view(torch.uint8))


def test_a_scale_is_refused_beside_numbers():
    args = given("joined")
    args[5] = torch.tensor(1.0)
    with pytest.raises(ValueError, match="scales are accepted with E4M3 caches only"):
        op(*args)
