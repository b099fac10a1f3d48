"""E4M3 on Hopper: V as its transposition leaves it, and the sums that a tolerance is derived from."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import Target
from torch_attnkit.cuda import compile
from torch_attnkit.kernels.prefill.launch import scalars
from torch_attnkit.kernels.prefill.sm90.launch import trace_transpose_v
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.oracle import tensor_cores
from torch_attnkit.oracle.attention import attend, narrow_products
from torch_attnkit.oracle.hopper_sums import TensorCoreSums

E4M3 = torch.float8_e4m3fn
N = 64  # keys of a block
HEADS, DV = 2, 32


@pytest.fixture
def transpose():
    """What runs the transposition's kernel in the simulator: (v, low, high, shape of the result, window) -> result."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

    def run(q, v, low, high, shape, window=-1, sinks=0):
        packed = v.dim() == 3
        lengths = {} if packed else dict(kv_len=high is not None, kv_start=low is not None)
        launch = compile.launcher(
            Target("sm90", True), v.device, trace_transpose_v, varlen=packed, dtype="f8e4m3", dim=32, dim_v=DV,
            tile_n=N, window=window >= 0, sink_tokens=sinks > 0, **lengths,
        )  # fmt: skip
        out = torch.full(shape, 0x7F, dtype=torch.uint8)  # NaN
        launch_scalars = scalars(Scores(32, window=window, sink_tokens=sinks), 1, 132)
        with torch_attnkit.simulate("sm90"):
            launch((q, q.new_zeros(v.shape), v, None, low, high, None), out, launch_scalars)
        return out

    return run


def ordered(columns: torch.Tensor) -> torch.Tensor:
    """Keys (..., S) as the kernel wants them: of every 32, place 16 h + 4 t + 2 i + e has key 16 h + 8 i + 2 t + e."""
    of_32 = columns.unflatten(-1, (-1, 2, 2, 4, 2))  # (..., 32s, h, i, t, e)
    return of_32.transpose(-2, -3).flatten(-5)


def values_of(*shape: int) -> torch.Tensor:
    return torch.randint(1, 100, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_keys_of_a_batch_lie_in_order_and_end_with_zeros(transpose):
    S = 150
    v, q = values_of(2, S, HEADS, DV), values_of(2, 3, HEADS, 32)
    start, end = torch.tensor([0, 70], dtype=torch.int32), torch.tensor([S, 75], dtype=torch.int32)
    got = transpose(q, v, start, end, (2, HEADS, DV, 3 * N))
    want = torch.zeros(2, HEADS, DV, 3 * N, dtype=torch.uint8)
    for b in range(2):
        want[b, ..., start[b] : end[b]] = v[b, start[b] : end[b]].permute(1, 2, 0)
    assert torch.equal(got, ordered(want))


def test_packed_sequences_begin_at_blocks(transpose):
    lengths = [5, 0, 130, 64]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    tail = 3  # keys of nobody behind the last sequence
    v, q = values_of(int(offsets[-1]) + tail, HEADS, DV), values_of(4, HEADS, 32)
    blocks = len(v) // N + len(lengths) + 1
    got = transpose(q, v, torch.arange(5, dtype=torch.int32), offsets, (HEADS, DV, blocks * N))
    want = torch.zeros(HEADS, DV, blocks * N, dtype=torch.uint8)
    for b, n in enumerate(lengths):
        first, at = int(offsets[b]), (int(offsets[b]) // N + b) * N
        want[..., at : at + n] = v[first : first + n].permute(1, 2, 0)
    assert torch.equal(got, ordered(want))


def test_keys_outside_of_all_windows_are_zeros(transpose):
    """Two queries at the end see 20 keys each, besides the first 3."""
    S = 100
    v, q = values_of(1, S, HEADS, DV), values_of(1, 2, HEADS, 32)
    got = transpose(q, v, None, None, (1, HEADS, DV, 2 * N), window=20, sinks=3)
    want = torch.zeros(1, HEADS, DV, 2 * N, dtype=torch.uint8)
    for low, high in ((0, 3), (S - 21, S)):
        want[0, ..., low:high] = v[0, low:high].permute(1, 2, 0)
    assert torch.equal(got, ordered(want))


def test_sums_are_those_of_tensor_cores():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 64, generator=gen).to(E4M3) for n, h in ((6, 4), (150, 2), (150, 2)))
    keep = torch.ones(1, 6, 150, dtype=torch.bool)
    with narrow_products():
        plain = attend(q, k, v, keep, scale=None)
        with TensorCoreSums():
            out, lse, _ = attend(q, k, v, keep, scale=None)
    scores = torch.stack([tensor_cores.products(q[0, :, h], k[0, :, h // 2]) for h in range(4)], 1) / 8  # (T, Hq, S)
    torch.testing.assert_close(lse[0], scores.logsumexp(-1), rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    assert 0 < (lse - plain[1]).abs().max() < 1e-2, "14 bits of the largest product"
    weights = ((scores - scores.amax(-1, keepdim=True)).exp() * 256).to(E4M3).float()
    total = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1) * 256
    for h in range(4):
        values = v[0, :, h // 2].float()
        result = sum(tensor_cores.products(weights[:, h, at], values[at].T) for at in (slice(0, 128), slice(128, 150)))
        torch.testing.assert_close(out[0, :, h].float(), result / total[:, h, None], rtol=2**-7, atol=2**-9)
