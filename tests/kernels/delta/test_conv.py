"""causal_conv1d: beside PyTorch's convolution and transformers' update, packed sequences and slots."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_attnkit.core.dispatch import OPS

op = torch.ops.attnkit.causal_conv1d
CASES = OPS["causal_conv1d"].module("cases")
LENGTHS = (17, 1, 0, 40)


def made(seed: int = 0, **dims: object):
    gen = torch.Generator().manual_seed(seed)
    return CASES.make(dict(lengths=LENGTHS, C=20, W=4, Ws=4) | dims, torch.float32, ("bias",), gen)[0]


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize(("width", "columns"), [(4, 4), (4, 3), (3, 6), (2, 1)])
def test_tokens_are_those_of_pytorchs_convolution(target, width, columns):
    x, weight, state, cu, index, bias, _ = made(W=width, Ws=columns)
    before, begin = state.clone(), 0
    out = op(x, weight, state, cu, index, bias)
    for length, slot in zip(LENGTHS, index.tolist(), strict=True):
        if length == 0:
            assert torch.equal(state[slot], before[slot])
            continue
        rows = torch.cat([before[slot].T, x[begin : begin + length]])
        wanted = F.conv1d(rows.T[None], weight[:, None], bias, groups=20)[0].T
        wanted = F.silu(wanted)[len(wanted) - length :]
        torch.testing.assert_close(out[begin : begin + length], wanted, rtol=1e-5, atol=2e-6)
        assert torch.equal(state[slot], rows[-columns:].T)
        begin += length


def same(target: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bits, but of PyTorch on a CPU, whose silu rounds by where in its vectors an element lies."""
    if target == "cpu":
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    else:
        assert torch.equal(found, wanted)


def test_a_step_is_transformers_update(target):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    x, weight, state, cu, index, _, _ = made(lengths=(1, 1, 1))
    theirs = state[index.long()].clone()
    wanted = causal_conv1d_update(x[:, :, None], theirs, weight, None, "silu")
    out = op(x, weight, state, cu, index)
    torch.testing.assert_close(out, wanted[:, :, 0], rtol=1e-5, atol=2e-6)
    assert torch.equal(state[index.long()], theirs)


def test_a_prompt_in_parts_and_in_any_batch_has_the_same_bits(target):
    x, weight, state, cu, index, bias, _ = made()
    first, last = state.clone(), state.clone()
    out = op(x, weight, last, cu, index, bias)
    slot, rows, begin = index[3:], [], 18
    for length in (2, 16, 1, 21):
        rows.append(op(x[begin : begin + length], weight, first, offsets(length), slot, bias))
        begin += length
    same(target, torch.cat(rows), out[18:])
    assert torch.equal(first[slot.long()], last[slot.long()])


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 1)])
@pytest.mark.parametrize("shifts", [(0, 0, 1), (0, 4, 0), (1, 0, 0), (0, 0, 8)])
def test_a_step_finds_its_tensors_at_any_address(target, lengths, shifts):
    """x, weight and conv_state so many elements behind an address that vectors of 16 bytes may have."""
    gen = torch.Generator().manual_seed(0)
    args = CASES.make(dict(lengths=lengths, C=24, W=4, Ws=4), torch.bfloat16, ("bias",), gen)[0]
    buffers = [
        torch.cat([t.new_ones(shift), t.flatten(), t.new_ones(8)]) for t, shift in zip(args, shifts, strict=False)
    ]
    moved = [b[shift : b.numel() - 8].view(t.shape) for b, t, shift in zip(buffers, args, shifts, strict=False)]
    same(target, op(*moved, *args[3:]), op(*args))
    assert torch.equal(moved[2], args[2])
    assert buffers[2][: shifts[2]].eq(1).all() and buffers[2][-8:].eq(1).all()


def test_slots_that_are_new_absent_or_without_tokens(target):
    x, weight, state, cu, index, bias, _ = made(tail=3)
    index[1] = -1
    past = torch.tensor([0, 5, 0, 9], dtype=torch.int32)
    state[index[0].long()] = torch.nan
    before = state.clone()
    out = op(x, weight, state, cu, index, bias, past)
    assert out.isfinite().all() and not out[17].any() and not out[58:].any()
    alone = op(x[:17], weight, torch.zeros_like(state[:1]), offsets(17), torch.zeros(1, dtype=torch.int32), bias)
    same(target, out[:17], alone)
    named = index[[0, 3]].long()
    others = torch.ones(len(state), dtype=torch.bool)
    others[named] = False
    assert torch.equal(state[others], before[others]) and state[named].isfinite().all()


def test_gradients_are_refused():
    args = made()
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="causal_conv1d"):
        op(*args[:6]).sum().backward()
