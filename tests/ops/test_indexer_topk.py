"""indexer_topk: exactly the entries that a brute-force selection picks, whatever the ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

op = torch.ops.attnkit.indexer_topk


def _brute(scores: np.ndarray, k_len: list[int], topk: int) -> list[list[int]]:
    """Pick the best remaining entry topk times; then sort what was picked and fill up with -1."""
    rows = []
    for s, n in zip(scores, k_len, strict=True):
        left = [j for j in range(n) if s[j] > -np.inf]  # false for nan
        picked = []
        while left and len(picked) < topk:
            best = left[0]
            for j in left:
                if s[j] > s[best]:
                    best = j
            left.remove(best)
            picked.append(best)
        rows.append(sorted(picked) + [-1] * (topk - len(picked)))
    return rows


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(0, 4),
    entries=st.integers(0, 40),
    topk=st.integers(1, 50),
    levels=st.integers(1, 6),
    holes=st.booleans(),
    limited=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    seed=st.integers(0, 2**20),
)
def test_equals_brute_force_with_many_ties(tokens, entries, topk, levels, holes, limited, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.5, 3.0, torch.inf] if not holes else [0.0, torch.nan, -torch.inf, 2.0, -2.0, 0.5]
    )
    scores = values[torch.randint(0, levels, (tokens, entries), generator=gen)].to(dtype)
    k_len = torch.randint(0, entries + 1, (tokens,), generator=gen, dtype=torch.int32) if limited else None
    indices = op(scores, k_len, topk=topk)
    lengths = [entries] * tokens if k_len is None else k_len.tolist()
    assert indices.dtype == torch.int32 and indices.shape == (tokens, topk)
    assert indices.tolist() == _brute(scores.double().numpy(), lengths, topk)


def test_of_equal_scores_the_first_are_taken():
    assert op(torch.zeros(1, 5000), topk=512)[0].tolist() == list(range(512))


def test_signed_zeros_are_ties():
    assert op(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), topk=2).tolist() == [[0, 1]]


def test_the_set_is_that_of_torch_topk_where_no_two_scores_are_equal():
    scores = torch.stack([torch.randperm(3000) for _ in range(4)]).float()
    assert torch.equal(op(scores, topk=512).long(), scores.topk(512).indices.sort(-1).values)


def test_entries_beyond_the_length_are_not_looked_at():
    scores, k_len = torch.randn(3, 64), torch.tensor([0, 10, 64], dtype=torch.int32)
    want = op(scores, k_len, topk=16)
    for poison in (torch.inf, torch.nan):
        dirty = scores.masked_fill(torch.arange(64) >= k_len[:, None], poison)
        assert torch.equal(op(dirty, k_len, topk=16), want)
    assert want[0].tolist() == [-1] * 16
    assert want[1].tolist() == [*range(10), *[-1] * 6]


def test_a_length_equals_a_mask_of_minus_infinity():
    scores, k_len = torch.randn(5, 50), torch.tensor([0, 1, 17, 49, 50], dtype=torch.int32)
    masked = scores.masked_fill(torch.arange(50) >= k_len[:, None], -torch.inf)
    assert torch.equal(op(scores, k_len, topk=8), op(masked, topk=8))


def test_strided_rows_and_poisoned_neighbours_do_not_matter_and_inputs_stay():
    scores, k_len = torch.randn(4, 30), torch.tensor([30, 3, 0, 15], dtype=torch.int32)
    buffer = torch.full((8, 64), torch.inf)
    buffer[::2, 16:46] = scores
    before = (buffer.clone(), k_len.clone())
    assert torch.equal(op(buffer[::2, 16:46], k_len, topk=7), op(scores, k_len, topk=7))
    assert torch.equal(buffer, before[0]) and torch.equal(k_len, before[1])


def test_refusals_name_op_argument_found_and_accepted():
    scores = torch.randn(2, 6)
    for topk in (0, -3):
        with pytest.raises(ValueError, match=rf"indexer_topk: topk must be at least 1 \(got .*K={topk}\)"):
            op(scores, topk=topk)
    for value in (-1, 7):
        with pytest.raises(ValueError, match=rf"indexer_topk: k_len\[1\] is {value}, accepted: 0 to 6"):
            op(scores, torch.tensor([6, value], dtype=torch.int32), topk=2)
    with pytest.raises(TypeError, match="indexer_topk: k_len is f32, accepted: i32, i64"):
        op(scores, torch.tensor([6.0, 6.0]), topk=2)
    with pytest.raises(
        ValueError, match=r"indexer_topk: k_len must be \(Tq\), got shape \(3,\): Tq=3, but scores has Tq=2"
    ):
        op(scores, torch.zeros(3, dtype=torch.int32), topk=2)
