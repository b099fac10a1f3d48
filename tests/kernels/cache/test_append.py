"""The kernel that appends a token of each sequence to caches, in the simulator: hostile slots, moving rows, memory."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit.core.dispatch import OPS

from .checking import checked

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.rope_kv_cache_append
CASES = OPS["rope_kv_cache_append"].module("cases")
HOSTILE = (-(2**63), -(2**31), -2, 20, 2**31, 2**32 + 3)  # of 20 rows


def given(case: str, dtype: torch.dtype = torch.bfloat16, **changes: int) -> list[torch.Tensor]:
    args, _ = CASES.make(CASES.PARITY[case] | changes, dtype, (), torch.Generator().manual_seed(3))
    return list(args)


def both(args: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and caches of the definition and of the kernel."""
    own = [[*args[:3], *(t.clone() for t in args[3:5]), *args[5:]] for _ in range(2)]
    found = [[*op(*own[0]), *own[0][3:5]]]
    with checked("sm90"):
        found.append([*op(*own[1]), *own[1][3:5]])
    return found[0], found[1]


def test_slots_outside_of_the_cache_are_passed_over():
    args = given("gptoss", B=7, one=0)
    args[7] = torch.tensor([*HOSTILE, 13], dtype=torch.int64)
    k, v = (t.clone() for t in args[3:5])
    with checked("sm90"):
        op(*args)
    assert torch.equal(args[3][:6], k[:6]) and torch.equal(args[4][:6], v[:6])
    assert torch.equal(args[4][6, :, 13], args[2][6]) and not torch.equal(args[3][6, :, 13], k[6, :, 13])
    args[3][6, :, 13], args[4][6, :, 13] = k[6, :, 13], v[6, :, 13]
    assert torch.equal(args[3], k) and torch.equal(args[4], v)


@pytest.mark.parametrize("rows", [1, 2, 33, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_full_caches_move_up_by_one_in_place(rows, dtype):
    """Of 128 rows of 64 numbers all are in flight at once; of more some move before others are read."""
    args = given("window", dtype, S=rows)
    want, got = both(args)
    for w, g in zip(want, got, strict=True):
        assert torch.equal(w, g)
    assert torch.equal(got[2][:, :, :-1], args[3][:, :, 1:]) and torch.equal(got[3][:, :, -1], args[2])


@pytest.mark.parametrize("case", ["gptoss", "window"])
def test_tokens_that_lie_in_a_cache_are_read_before_they_are_overwritten(case):
    args = given(case)
    value = args[4][:, :, 2].clone()
    args[2] = args[4][:, :, 2]
    want, got = both(args)
    assert torch.equal(want[0], got[0])
    with checked("sm90"):
        op(*args)
    row = -1 if args[7] is None else int(args[7])
    assert torch.equal(args[4][:, :, row], value)


@pytest.mark.parametrize("odd", ["q", "cache", "cos"])
@pytest.mark.parametrize("case", ["gptoss", "window"])
def test_addresses_that_vectors_do_not_reach(case, odd):
    """The plan knows strides, not where memory begins."""
    args = given(case)
    at = dict(q=0, cache=3, cos=5)[odd]
    t = args[at]
    held = torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    args[at] = held.copy_(t)
    want, got = both(args)
    if odd != "cache":
        for w, g in zip(want, got, strict=True):
            assert torch.equal(w, g)
    with checked("sm90"):
        assert torch.equal(op(*args)[0], want[0])
    assert torch.equal(args[3], want[2])


def test_sinks_return_in_float32():
    args = given("gptoss")
    args[8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, *torch.randn(11).tolist()]).bfloat16()
    with checked("sm90"):
        found = op(*args)[1]
    assert found.dtype == torch.float32 and torch.equal(found, args[8].float())
    assert op(*args[:8])[1].shape == (0,)


def test_what_no_row_takes_is_refused():
    args = given("gptoss")
    for at, wrong, word in (
        (5, args[5].expand(3, -1, -1), "cos and sin must have a row for each sequence, or one"),
        (7, args[7].expand(3), "slot must be one for each sequence, or one"),
        (3, args[3][:, :, :1].expand(-1, -1, 20, -1), "must not overlap themselves"),
    ):
        given_wrong = [*args]
        given_wrong[at] = wrong
        if at == 5:
            given_wrong[6] = args[6].expand(3, -1, -1)
        with pytest.raises(ValueError, match=word):
            op(*given_wrong)
    with pytest.raises(ValueError, match=r"slot\[0\] is 20, accepted: -1 to 19"):
        op(*args[:7], torch.tensor([20]))
