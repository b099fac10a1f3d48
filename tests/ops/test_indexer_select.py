"""indexer_select: the entries that scores and selection, one after the other, choose."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS

OP = OPS["indexer_select"]
op = torch.ops.attnkit.indexer_select
ops = torch.ops.attnkit


def _rows(form: str, gen: torch.Generator, *shape: int):
    """Random rows: stored, and their scales or None."""
    x = torch.randn(*shape, generator=gen)
    if form == "none":
        return x, None
    if form == "fp8":
        return x.to(torch.float8_e4m3fn), torch.rand(*shape[:-1], 1, generator=gen) + 0.5
    return ops.mxfp4_quantize(x)


@pytest.mark.parametrize("form", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("topk", [1, 12, 80])
def test_what_is_chosen_has_the_largest_scores(form, topk):
    """By scores in float64: nothing left out is larger than something chosen, but for roundings of float32 sums."""
    gen = torch.Generator().manual_seed(topk)
    (q, q_scale), (k, k_scale) = _rows(form, gen, 6, 8, 64), _rows(form, gen, 2, 60, 64)
    weights, k_len = torch.randn(6, 8, generator=gen), torch.tensor([60, 12, 0, 1, 59, 33], dtype=torch.int32)
    got = op(q, k, weights, k_len, None, None, q_scale, k_scale, format=form, topk=topk)
    args = (q, k, weights, k_len, None, None, q_scale, k_scale)
    exact = _in_float64(args, form)
    assert got.shape == (6, topk) and got.dtype == torch.int32
    bound = 2.0**-20 * exact.masked_fill(exact.isinf(), 0).abs().max()
    for t, n in enumerate(k_len.tolist()):
        chosen = got[t][: min(topk, n)].long()
        assert (chosen.diff() > 0).all() and (chosen >= 0).all() and (chosen < n).all()
        assert (got[t][min(topk, n) :] == -1).all()
        left = torch.ones(60, dtype=torch.bool).index_fill(0, chosen, False)[:n]
        if len(chosen) and left.any():
            assert exact[t, :n][left].max() <= exact[t, chosen].min() + bound


@pytest.mark.parametrize("features", parity.feature_sets(OP, tuple(OP.features)))
@pytest.mark.parametrize("shape", parity.shapes(OP))
def test_it_is_selection_after_scores_and_its_cases_are_exact(shape, features):
    args, kwargs = parity.inputs(OP, shape, torch.bfloat16, features)
    got = op(*args, **kwargs)
    scores = ops.indexer_scores(*args, format=kwargs["format"])
    assert torch.equal(got, ops.indexer_topk(scores, args[3], topk=kwargs["topk"]))
    # Exact: as in float64, and no order of adding up has a sum that float32 does not hold.
    assert torch.equal(scores.double(), _in_float64(args, kwargs["format"]))
    channels = args[0].shape[-1] * (2 if kwargs["format"] == "mxfp4" else 1)
    most = [t.float().abs().max().item() if t is not None and t.numel() else 1 for t in (args[2], args[6], args[7])]
    if kwargs["format"] == "mxfp4":
        most[1:] = 1, 1  # in the numbers already
    assert channels * 2 * 2 * args[0].shape[1] * most[0] * most[1] * most[2] < 2**24


def _in_float64(args, form: str) -> torch.Tensor:
    """The scores."""
    wide = [*args[:2], args[2].double(), *args[3:]]
    return OPS["indexer_scores"].module("reference").reference(*wide, form).double()


def test_many_scores_of_the_cases_tie():
    args, kwargs = parity.inputs(OP, "tokens", torch.bfloat16, ())
    scores = ops.indexer_scores(*args, format=kwargs["format"])
    longest = scores[0][scores[0].isfinite()]
    assert len(longest.unique()) < len(longest)


def test_of_equal_scores_the_first_are_taken_and_nan_is_never():
    q, k = torch.ones(1, 2, 32), torch.ones(1, 40, 32)
    k[0, 3] = torch.nan
    got = op(q, k, torch.ones(1, 2), torch.tensor([40], dtype=torch.int32), topk=5)
    assert got.tolist() == [[0, 1, 2, 4, 5]]


def test_refusals_name_this_op():
    q, k, weights = torch.randn(2, 3, 32), torch.randn(1, 8, 32), torch.randn(2, 3)
    k_len = torch.tensor([8, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indexer_select: topk must be at least 1 \(got .*K=0\)"):
        op(q, k, weights, k_len, topk=0)
    with pytest.raises(ValueError, match=r"indexer_select: k_len\[0\] is 9, accepted: 0 to 8"):
        op(q, k, weights, k_len + torch.tensor([1, 0], dtype=torch.int32), topk=2)
    with pytest.raises(TypeError, match="indexer_select: k is f32, accepted with format 'fp8': f8e4m3"):
        op(q.to(torch.float8_e4m3fn), k, weights, k_len, k_scale=torch.ones(1, 8, 1), format="fp8", topk=2)
    table = torch.tensor([[0, 7]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indexer_select: block_table\[0\]\[1\] is 7, accepted: 0 to 1"):
        op(q, k.view(2, 4, 32), weights, k_len, None, table, topk=2)
