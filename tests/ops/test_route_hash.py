"""route_hash: experts and order are the table's, the weights those of route_sqrt_softplus."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

op = torch.ops.attnkit.route_hash
INTEGERS = (torch.int32, torch.int64)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    experts=st.sampled_from((1, 7, 144)),
    topk=st.integers(1, 6),
    ids=st.sampled_from(INTEGERS),
    table=st.sampled_from(INTEGERS),
    renormalize=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
    seed=st.integers(0, 2**20),
)
def test_looks_up_experts_and_weighs_them_by_their_scores(rows, experts, topk, ids, table, renormalize, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, experts, generator=gen)).to(dtype)
    token_ids = torch.randint(0, 11, (rows,), generator=gen, dtype=ids)
    tid2eid = torch.randint(0, experts, (11, topk), generator=gen, dtype=table)
    weights, indices = op(logits, token_ids, tid2eid, renormalize=renormalize, route_scale=1.5)
    want = [tid2eid[t].tolist() for t in token_ids.tolist()]
    assert indices.dtype == torch.int32 and indices.tolist() == want
    s = torch.log1p(logits.double().exp()).sqrt().gather(1, indices.long())  # (R, K)
    exact = 1.5 * (s / (s.sum(-1, keepdim=True) + 1e-20) if renormalize else s)
    assert weights.dtype == torch.float32
    assert bool(((weights.double() - exact).abs() <= (topk + 16) * 2.0**-24 * exact).all())


def test_a_table_that_repeats_the_top_k_router_gives_its_weights():
    logits = torch.randn(9, 144)
    weights, indices = torch.ops.attnkit.route_sqrt_softplus(logits, topk=6, route_scale=2.5)
    got = op(logits, torch.arange(9), indices, route_scale=2.5)
    assert torch.equal(got[0], weights) and torch.equal(got[1], indices)


def test_an_expert_may_stand_twice_and_counts_twice():
    weights, indices = op(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([[2, 2, 1]]))
    assert indices.tolist() == [[2, 2, 1]]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3, rel=4 * 2.0**-23)


def test_scores_of_zero_give_weights_zero():
    weights, _ = op(torch.full((2, 4), -1e4), torch.tensor([0, 0]), torch.tensor([[0, 3]]))
    assert torch.equal(weights, torch.zeros(2, 2))


def test_rows_of_the_table_that_no_token_uses_may_hold_anything():
    table = torch.full((6, 2), -999, dtype=torch.int32)
    table[[1, 4]] = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    _, indices = op(torch.zeros(3, 4), torch.tensor([4, 1, 4]), table)
    assert indices.tolist() == [[2, 1], [0, 3], [2, 1]]


def test_strided_inputs_do_not_matter_and_inputs_stay():
    logits, ids = torch.randn(5, 8), torch.tensor([2, 0, 1, 1, 2])
    table = torch.randint(0, 8, (3, 2))
    buffer = torch.full((10, 24), torch.nan)
    buffer[::2, 4:12] = logits
    wide = torch.full((6, 9), -7)
    wide[1::2, 3:5] = table
    before = (buffer.clone(), wide.clone(), ids.clone())
    got, want = op(buffer[::2, 4:12], ids, wide[1::2, 3:5]), op(logits, ids, table)
    assert torch.equal(got[1], want[1])
    assert bool(((got[0] - want[0]).abs() <= (2 + 16) * 2.0**-23 * want[0]).all())
    got[1].fill_(0)
    for a, b in zip(before, (buffer, wide, ids), strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize(("experts", "vocabulary"), [(4, 3), (0, 3), (4, 0)])
def test_no_tokens_need_no_experts_and_no_table(experts, vocabulary):
    weights, indices = op(
        torch.zeros(0, experts), torch.zeros(0, dtype=torch.int64), torch.zeros(vocabulary, 2, dtype=torch.int64)
    )
    assert weights.shape == indices.shape == (0, 2)


def test_refusals_name_op_argument_found_and_accepted():
    logits, ids, table = torch.randn(2, 4), torch.tensor([0, 2]), torch.tensor([[0, 1], [4, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"route_hash: token_ids\[1\] is 3, accepted: 0 to 2"):
        op(logits, torch.tensor([0, 3]), table)
    with pytest.raises(ValueError, match=r"route_hash: token_ids\[0\] is -1, accepted: 0 to 2"):
        op(logits, torch.tensor([-1, 0]), table)
    with pytest.raises(ValueError, match=r"route_hash: tid2eid\[token_ids\]\[0, 0\] is 4, accepted: 0 to 3"):
        op(logits, torch.tensor([1, 0]), table)
    with pytest.raises(ValueError, match=r"route_hash: logits holds nan, accepted: numbers"):
        op(torch.full((2, 4), torch.nan), ids, table)
    with pytest.raises(ValueError, match=r"route_hash: K must be at least 1 \(got .*K=0\)"):
        op(logits, ids, table[:, :0])
    with pytest.raises(TypeError, match=r"route_hash: token_ids is f32, accepted: i32.*i64"):
        op(logits, ids.float(), table)
    with pytest.raises(
        ValueError, match=r"route_hash: token_ids must be \(R\), got shape \(3,\): R=3, but logits has R=2"
    ):
        op(logits, torch.tensor([0, 1, 2]), table)
