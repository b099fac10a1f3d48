"""The product of few tokens, in the simulator: every number of tokens, ends of rows and of K, memory."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cache.checking import checked
from torch_attnkit.core import UnsupportedError, simulate
from torch_attnkit.kernels.batched_gemm.few import few

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

op = torch.ops.attnkit.linear_decode


def judged(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One rounding to the dtype, and of float32 those of K products' sums, cut among 8 warps."""
    with checked("sm90"):
        got = op(x, weight, bias)
    terms = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        terms, size = terms + bias.double(), size + bias.double().abs()
    bound = terms.abs() * torch.finfo(x.dtype).eps / 2 + size * (x.shape[1] + 8) * 2.0**-24
    assert bool(((got.double() - terms).abs() <= bound).all())
    return got


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize(("k", "n"), [(32, 16), (2880, 32), (288, 33)])
def test_tokens_and_ends_of_rows_and_of_k(tokens, k, n):
    """2880 numbers are 45 steps of two chunks, of which eight warps have 5 or 6; 32 and 288 end in half a step."""
    gen = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, k, generator=gen).bfloat16(), torch.randn(n, k, generator=gen).bfloat16()
    judged(x, weight, torch.randn(n, generator=gen).bfloat16() if n != 33 else None)


@pytest.mark.parametrize("n", [32, 4232])
def test_a_token_has_the_same_bits_among_others(n):
    """CTAs of 8 rows, and so many rows that a few tokens have CTAs of 8 and more tokens of 16."""
    gen = torch.Generator().manual_seed(n)
    x, weight = torch.randn(16, 352, generator=gen).bfloat16(), torch.randn(n, 352, generator=gen).bfloat16()
    batch = judged(x, weight, None)
    with simulate("sm90"):
        single = torch.cat([op(x[i : i + 1], weight) for i in (0, 15)])
    assert (few(1, n, 132).rows, few(16, n, 132).rows) == ((8, 8) if n == 32 else (8, 16))
    assert torch.equal(batch[[0, 15]], single)


def test_infinite_weights_of_one_row_stay_in_it():
    """Steps past the end of K multiply zeros by zeros."""
    x, weight = torch.ones(3, 2880).half(), torch.zeros(40, 2880).half()
    weight[7, 2879] = torch.inf
    with checked("sm90"):
        got = op(x, weight)
    want = torch.zeros(3, 40).half()
    want[:, 7] = torch.inf
    assert torch.equal(got, want)


def test_addresses_that_vectors_do_not_reach_are_copied():
    gen = torch.Generator().manual_seed(0)
    held = torch.randn(2 * 64 + 1, generator=gen).bfloat16()
    judged(held[1:].view(2, 64), torch.randn(8, 64, generator=gen).bfloat16(), None)


def test_many_tokens_are_refused():
    x, weight = torch.zeros(17, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    with simulate("sm90"), pytest.raises(UnsupportedError, match="at most 16 tokens"):
        op(x, weight)
    with simulate("sm90"), pytest.raises(UnsupportedError, match="K must be a multiple of 32"):
        op(x[:2, :24], weight[:, :24])
