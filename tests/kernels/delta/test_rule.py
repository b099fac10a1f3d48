"""gated_delta_rule: beside transformers' function and decode steps, packed sequences and slots."""

from __future__ import annotations

import pytest
import torch

from tests.targets import needs, on
from torch_attnkit.core import UnsupportedError
from torch_attnkit.core.dispatch import OPS

op = torch.ops.attnkit.gated_delta_rule
CASES = OPS["gated_delta_rule"].module("cases")
SIZES = dict(Hk=1, Hv=2, K=64, V=24, decay=2)
LENGTHS = (33, 1, 64, 20)  # beside the borders of chunks
# Kernels by tensor cores have operands of 16 bits.
OFF = {"cpu": 2e-5, "metal": 2e-5, "sm90": 1e-2, "sm80": 1e-2}


def made(target: str, seed: int = 0, **dims: object):
    gen = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if target in ("sm90", "sm80") else torch.float32
    return CASES.make(SIZES | dict(lengths=LENGTHS) | dims, dtype, (), gen)[0]


def part(args, first: int, last: int):
    """The five tensors of tokens."""
    return [t[first:last] for t in args[:5]]


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def close(target: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    off = (found.float() - wanted.float()).abs().max()
    assert off <= OFF[target] * wanted.float().abs().max()


def same(target: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bits, of kernels; how torch adds up follows from the batch."""
    if target == "cpu":
        close(target, found, wanted)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dims", [{}, dict(decay=1), dict(alike=1, decay=3)], ids=["slow", "fast", "one key"])
def test_tokens_are_those_of_transformers(target, dims):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    args = made(target, lengths=(70, 70), **dims)
    q, k, v, g, beta, state, _, index, _ = args
    before = state[index.long()].clone()
    out = op(*args)
    want, last = torch_chunk_gated_delta_rule(
        *(t.unflatten(0, (2, 70)) for t in (q, k, v)), g=g.unflatten(0, (2, 70)), beta=beta.unflatten(0, (2, 70)),
        initial_state=before.mT, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    close(target, out, want.flatten(0, 1))
    close(target, state[index.long()].mT, last)


def test_a_prompt_in_parts_goes_on_where_the_part_before_ended(target):
    args = made(target, lengths=(96,))
    state, slot = args[5].clone(), args[7]
    out = op(*args)
    rows, first = [], 0
    for length in (32, 7, 57):
        rows.append(op(*part(args, first, first + length), state, offsets(length), slot))
        first += length
    close(target, torch.cat(rows), out)
    close(target, state[slot.long()], args[5][slot.long()])


def test_past_of_zero_begins_with_zeros_whatever_the_slot_holds(target):
    args = made(target)
    state, index = args[5], args[7].long()
    state[index[[0, 2]]] = torch.nan
    past = torch.tensor([0, 4, 0, 9], dtype=torch.int32)
    out = op(*args[:8], past)
    assert out.isfinite().all() and state[index].isfinite().all()
    empty = torch.zeros_like(state[:1])
    alone = op(*part(args, 0, 33), empty, offsets(33), torch.zeros(1, dtype=torch.int32))
    assert torch.equal(alone, out[:33]) and torch.equal(empty[0], state[index[0]])


def test_a_sequence_has_the_same_bits_in_any_batch_and_slot(target):
    args = made(target)
    before, index = args[5].clone(), args[7].long()
    out, first = op(*args), 0
    for b, length in enumerate(LENGTHS):
        pool = torch.full((3, *before.shape[1:]), torch.nan)
        pool[2] = before[index[b]]
        got = op(*part(args, first, first + length), pool, offsets(length), torch.tensor([2], dtype=torch.int32))
        same(target, got, out[first : first + length])
        same(target, pool[2], args[5][index[b]])
        assert pool[:2].isnan().all()
        first += length


def test_sequences_without_tokens_or_slots_change_nothing(target):
    args = made(target, lengths=(0, 40, 0, 3), tail=5)
    state, index = args[5], args[7].clone()
    index[3] = -1
    before = state.clone()
    out = op(*args[:7], index, torch.zeros(4, dtype=torch.int32))
    assert not out[40:].any() and out[:40].any()
    kept = torch.ones(len(state), dtype=torch.bool)
    kept[index[1].long()] = False
    assert torch.equal(state[kept], before[kept]) and not torch.equal(state[~kept], before[~kept])


def test_steps_behind_a_prompt_are_the_prompts_of_one_token(target):
    args = made(target, lengths=(32, 32), decay=1)
    q, k, v, g, beta, state, _, index, _ = args
    stepped, slots = state.clone(), index[:, None]
    rule = op(*(torch.cat([t[:1], t[32:33]]) for t in (q, k, v, g, beta)), state, offsets(1, 1), index)
    zero = torch.zeros(2)
    # g = -exp(A_log) softplus(a + dt_bias) with A_log 0: a is what gives g.
    a, b = torch.log(torch.expm1(-g.double())).to(q.dtype), torch.logit(beta.double()).to(q.dtype)
    tokens = [torch.cat([t[:1], t[32:33]])[:, None] for t in (q, k, v, a, b)]
    step = torch.ops.attnkit.gated_delta_step(*tokens, zero, zero, stepped, slots)
    close("sm90", rule, step[:, 0])
    close("sm90", stepped[index.long()], state[index.long()])


def test_two_runs_have_the_same_bits(target):
    args = made(target, lengths=(100,), alike=2, decay=3)
    state = args[5].clone()
    first, second = op(*args), op(*args[:5], state, *args[6:])
    assert torch.equal(first, second) and torch.equal(state, args[5])


@pytest.mark.simulator
def test_sizes_without_a_kernel_are_refused_by_name():
    needs("sm90")
    with (
        on("sm90"),
        pytest.raises(UnsupportedError, match="gated_delta_rule on sm90.*K must be a multiple of 16 up to 128"),
    ):
        op(*made("sm90", K=256))


@pytest.mark.parametrize("dims", [{}, dict(decay=1), dict(alike=2, decay=3), dict(decay=3, twice=1)], ids=str)
def test_the_definition_by_chunks_is_that_by_tokens(dims, monkeypatch):
    reference, found = OPS["gated_delta_rule"].module("reference"), []
    for least in (1, 1000):
        monkeypatch.setattr(reference, "LONG", least)
        gen = torch.Generator().manual_seed(1)
        args = CASES.make(SIZES | dict(lengths=LENGTHS, past=1) | dims, torch.float64, (), gen)[0]
        found.append((reference.reference(*args), args[5]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if a.dtype == torch.float32 else 1e-13)


def test_gradients_are_refused():
    args = made("cpu")
    args[2].requires_grad_()
    with pytest.raises(RuntimeError, match="gated_delta_rule"):
        op(*args).sum().backward()


def test_a_nan_in_a_query_is_its_tokens_alone(target):
    args = made(target)
    args[0][40, 0, 3] = torch.nan
    out = op(*args)
    lost = torch.zeros(len(out), dtype=torch.bool)
    lost[40] = True
    assert torch.equal(out.isnan().all((1, 2)), lost) and torch.equal(out.isnan().any(2).any(1), lost)
    assert args[5][args[7].long()].isfinite().all()
