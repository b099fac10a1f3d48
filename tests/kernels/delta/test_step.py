"""gated_delta_step: beside transformers' function, drafts, and slots, by the definition and in the simulators."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import batch_invariant
from torch_attnkit.core import UnsupportedError
from torch_attnkit.core.dispatch import OPS

op = torch.ops.attnkit.gated_delta_step
CASES = OPS["gated_delta_step"].module("cases")
SIZES = dict(Hk=2, Hv=4, K=64, V=24, decay=1)


def made(seed: int = 0, dtype: torch.dtype = torch.float32, **dims: int):
    gen = torch.Generator().manual_seed(seed)
    return CASES.make(SIZES | dims, dtype, (), gen)


def same(target, a: torch.Tensor, b: torch.Tensor) -> None:
    """Bits, of kernels; how torch adds up follows from the batch."""
    if target == "cpu":
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(a, b)


@pytest.mark.parametrize("dims", [{}, dict(alike=1, decay=3)], ids=["random", "one key"])
def test_tokens_are_those_of_transformers(target, dims):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    args, _ = made(B=3, n=4, **dims)
    q, k, v, a, b, log, bias, state, index, _ = args
    before = state[index[:, 0].long()].clone()
    out = op(*args)
    g = -log.exp() * torch.nn.functional.softplus(a + bias)
    want, last = torch_recurrent_gated_delta_rule(
        q, k, v, g, b.sigmoid(), initial_state=before.mT, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state[index[:, -1].long()].mT, last, rtol=2e-5, atol=2e-5)


def test_drafts_are_single_tokens_with_a_state_each(target):
    args, _ = made(B=3, n=4)
    state, index = args[7].clone(), args[8]
    out = op(*args)
    slot = index[:, :1].clone()
    for t in range(4):
        one = [x[:, t : t + 1] for x in args[:5]]
        got = op(*one, *args[5:7], state, slot)
        same(target, got, out[:, t : t + 1])
        same(target, state[slot[:, 0].long()], args[7][index[:, t].long()])


def test_a_step_begins_with_the_last_draft_that_was_accepted(target):
    args, _ = made(B=4, n=3)
    accepted = torch.tensor([1, 3, 0, 9], dtype=torch.int32)  # cut off at 1 and 3
    state, index = args[7].clone(), args[8]
    chosen = torch.tensor([0, 2, 0, 2])
    first = state[index[torch.arange(4), chosen].long()]
    out = op(*args[:7], args[7], index, accepted)
    alone = torch.cat([first, torch.zeros_like(state[:8])])
    slots = torch.stack([torch.arange(4), torch.arange(4, 8), torch.arange(8, 12)], 1).int()
    same(target, op(*args[:7], alone, slots), out)


def test_a_slot_of_minus_one_keeps_nothing(target):
    args, _ = made(B=3, n=2)
    state, index = args[7], args[8]
    index[1], index[2, 1] = -1, -1
    before, want = state.clone(), op(*made(B=3, n=2)[0])
    out = op(*args)
    assert not out[1].any() and torch.equal(out[[0, 2]], want[[0, 2]])
    named = index[index >= 0].long()
    others = torch.ones(len(state), dtype=torch.bool)
    others[named] = False
    assert torch.equal(state[others], before[others]) and not torch.equal(state[named], before[named])


def test_a_sequence_has_the_same_bits_in_any_batch_and_slot(target):
    args, _ = made(B=5, n=2, dtype=torch.bfloat16)
    state = args[7].clone()
    out = op(*args)
    for b in range(5):
        pool = torch.full((4, *state.shape[1:]), torch.nan)
        pool[3] = state[args[8][b, 0].long()]
        got = op(*(x[b : b + 1] for x in args[:5]), *args[5:7], pool, torch.tensor([[3, 1]], dtype=torch.int32))
        same(target, got[0].float(), out[b].float())
        same(target, pool[1], args[7][args[8][b, 1].long()])
        assert pool[[0, 2]].isnan().all()


def test_a_cpu_promises_no_such_bits():
    args, _ = made(B=2, n=1)
    with batch_invariant(), pytest.raises(UnsupportedError, match="gated_delta_step on cpu: .*how many sequences"):
        op(*args)


def test_huge_and_vanishing_gates(target):
    args, _ = made(B=2, n=1)
    a, b, log = args[3], args[4], args[5]
    a[0, 0], b[0, 0] = torch.tensor([1e4, -1e4, 30.0, 0.0]), torch.tensor([200.0, -200.0, 0.0, 50.0])
    log[:] = torch.tensor([3.0, 3.0, -100.0, 90.0])
    state = args[7].clone()
    out, want = op(*args), OPS["gated_delta_step"].module("reference").reference(*args[:7], state, *args[8:])
    assert out.isfinite().all()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)


def test_gradients_are_refused():
    args, _ = made(B=1, n=1)
    args[2].requires_grad_()
    with pytest.raises(RuntimeError, match="gated_delta_step"):
        op(*args).sum().backward()
