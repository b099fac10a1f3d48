"""Blocks of few queries over a cache of E4M3 on Hopper: whose calls they are, that they fit, and V transposed."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.kernels.prefill.problem import Layout, Problem
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.tiles import FP8, TILES, heads
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.parity.judge import judge

E4M3 = torch.float8_e4m3fn
H200 = 132  # multiprocessors
TRANSPOSED = 2  # stages of V transposed
NOWHERE = Layout((), ())
SHARED, RESERVED = 228 << 10, 1 << 10  # bytes of a multiprocessor, and of them what every block costs
op = torch.ops.attnkit.sdpa_multi


def problem(batch: int, queries: int, keys: int, group: int = 4, dim: int = 128) -> Problem:
    sizes = (batch, queries, keys, 8 * group, 8, dim, dim, Scores(dim), NOWHERE, NOWHERE, NOWHERE)
    return Problem(E4M3, torch.device("cpu"), *sizes, causal=True, cached=True)


@pytest.mark.parametrize(
    ("batch", "queries", "serves"),
    [(1, 1, True), (16, 64, True), (16, 65, False), (1, 128, True), (1, 2048, False), (4, 2048, False)],
)
def test_few_rows_and_few_tiles_are_not_a_dense_batch(batch, queries, serves):
    assert plan.packs_heads(problem(batch, queries, 8192), H200) == serves


def test_shared_memory_holds_the_operands_and_the_partial_results():
    for dim, dim_v in heads(FP8):
        choice = TILES[FP8, dim, dim_v]
        for t in (choice.few_rows, choice.many_rows, choice.row_pairs):
            held = t.tile_m * dim + t.tile_n * (t.stages * (dim + dim_v) + TRANSPOSED * dim_v)
            assert t.tile_m * (dim_v + 10) * 4 <= held, (dim, t)
            assert t.per_sm * (held + 1024 + RESERVED) <= SHARED, (dim, t)


@pytest.mark.parametrize("keys", [1, 700, 1 << 20])
def test_any_machine_gets_a_plan(keys):
    for sms in (1, 78, 132):
        for batch, queries in ((1, 1), (1, 17), (5, 4), (100, 1000)):
            chosen = plan.of_cache(problem(batch, queries, keys), sms)
            assert 1 <= chosen.ctas <= 8 and (chosen.ctas == 1 or not chosen.stream_k)


simulated = pytest.mark.usefixtures("simulator")


@pytest.fixture
def simulator():
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")


def inputs(batch: int, queries: int, keys: int, dim: int, heads: tuple[int, int] = (8, 2)) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = (batch, queries, heads[0], dim), (batch, heads[1], keys, dim), (batch, heads[1], keys, dim)
    return [torch.randn(*shape, generator=gen).to(E4M3) for shape in shapes]


def lengths(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int32)


@simulated
@pytest.mark.parametrize("causal", [True, False])
def test_both_kernels_are_right(causal, monkeypatch):
    """Also to queries before the first key, and with keys of nobody that are NaN."""
    q, k, v = inputs(2, 9, 150, 64)
    for t in (k, v):
        t.view(torch.uint8)[0, :, 5:] = 0x7F
    for dense in (False, True):
        monkeypatch.setattr(plan, "packs_heads", lambda p, sms, dense=dense: not dense)
        # Of another length, since what was built for a signature is kept.
        padded = [torch.nn.functional.pad(t.view(torch.uint8), (0, 0, 0, dense)).view(E4M3) for t in (k, v)]
        args = (q, *padded, lengths(5, 150))
        judge(f"dense {dense}", OPS["sdpa_multi"], "sm90", args, args, dict(causal=causal))
        with torch_attnkit.simulate("sm90"):
            out, lse = op(*args, causal=causal)
        assert torch.all(out[0, :4] == 0) and torch.all(lse[0, :4] == -torch.inf)


@pytest.mark.sample(7)
@simulated
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [4, 40])
def test_half_the_bytes_and_no_bank_conflicts(dim, queries):
    from torch_attnkit.sim import ptx

    qkv = inputs(1, queries, 1024, dim)
    with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
        op(*qkv, lengths(1024))
        op(*(t.bfloat16() for t in qkv), lengths(1024))
    codes, wide = (launch.counters for launch in launches)
    assert codes["shared_wavefronts"] == codes["shared_least_wavefronts"]
    assert codes["tma_read"] <= 0.52 * wide["tma_read"]  # tiles of 96 keys hold a little more than there are
