"""kimi_delta_step: beside transformers' functions of Kimi Linear and GLM-5, gated_delta_step, drafts and slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torch_attnkit.core.dispatch import OPS

op = torch.ops.attnkit.kimi_delta_step
CASES = OPS["kimi_delta_step"].module("cases")
SIZES = dict(H=3, K=64, V=24, decay=1)


def made(seed: int = 0, **dims: int):
    return CASES.make(SIZES | dims, torch.float32, (), torch.Generator().manual_seed(seed))


def theirs(kind: str, log: torch.Tensor, bias: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """g by transformers' own gate, whose projections give ``a``."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

    H, K = bias.shape
    config = SimpleNamespace(
        hidden_size=8, linear_head_dim=K, linear_num_heads=H, linear_lower_bound=-5.0 if kind == "glm" else None
    )
    gate = {"kimi": KimiLinearForgetGate, "glm": Glm5NextTextForgetGate}[kind](config)
    gate.f_a_proj, gate.f_b_proj = torch.nn.Identity(), torch.nn.Identity()
    with torch.no_grad():
        gate.A_log.copy_(log.view(gate.A_log.shape))
        gate.dt_bias.copy_(bias.flatten())
        return gate(a.flatten(2))


@pytest.mark.parametrize("kind", ["kimi", "glm"])
@pytest.mark.parametrize("dims", [{}, dict(alike=1, decay=2)], ids=["random", "one key"])
def test_tokens_are_those_of_transformers(target, dims, kind):
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    (q, k, v, a, b, log, bias, state, index, _), _ = made(B=2, n=4, **dims)
    before = state[index[:, 0].long()].clone()
    out = op(q, k, v, a, b, log, bias, state, index, lower_bound=-5.0 if kind == "glm" else None)
    g = theirs(kind, log, bias, a)
    want, last = recurrent_kimi_delta_attention(
        q, k, v, g, b.sigmoid(), initial_state=before.mT, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state[index[:, -1].long()].mT, last, rtol=2e-5, atol=2e-5)


def test_gates_that_are_a_heads_are_gated_delta_step(target):
    (q, k, v, a, b, log, bias, state, index, _), scalars = made(B=2, n=3)
    given = [a[..., :1].expand_as(q).contiguous(), b, log, bias[:, :1].expand(3, 64).contiguous()]
    a, bias, other = a[..., 0].contiguous(), bias[:, 0].contiguous(), state.clone()
    out = op(q, k, v, *given, state, index, **scalars)
    want = torch.ops.attnkit.gated_delta_step(q, k, v, a, b, log, bias, other, index)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, other, rtol=1e-5, atol=1e-5)


def test_drafts_are_single_tokens_with_a_state_each(target):
    args, _ = made(B=2, n=3)
    state, index = args[7].clone(), args[8]
    out, slot = op(*args), index[:, :1].clone()
    for t in range(3):
        got = op(*[x[:, t : t + 1] for x in args[:5]], *args[5:7], state, slot)
        torch.testing.assert_close(got, out[:, t : t + 1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state[slot[:, 0].long()], args[7][index[:, 2].long()], rtol=1e-6, atol=1e-6)


def test_no_more_than_what_is_named_is_read_or_written(target):
    """A sequence without a slot, a token whose state is not kept, and a step that begins with an accepted draft."""
    args, _ = made(B=3, n=2)
    state, index = args[7], args[8]
    index[1], index[2, 1] = -1, -1
    accepted = torch.tensor([2, 1, 1], dtype=torch.int32)
    state[index[0, 0].long()] = torch.nan  # not where the step begins
    unnamed = torch.ones(len(state), dtype=torch.bool)
    unnamed[[int(slot) for slot in index.flatten() if slot >= 0]] = False
    before = state.clone()
    out = op(*args[:9], accepted)
    assert out.isfinite().all() and not out[1].any()
    assert torch.equal(state[unnamed], before[unnamed])


@pytest.mark.parametrize("bound", [0.0, 2.0])
def test_a_bound_that_is_not_below_zero_is_refused(bound):
    with pytest.raises(ValueError, match="lower_bound must be below 0"):
        op(*made(B=1, n=1)[0], lower_bound=bound)
