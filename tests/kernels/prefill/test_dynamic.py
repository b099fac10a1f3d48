"""The dynamic persistent scheduler for dense and packed batches on Hopper: whose calls, every feature, any
lengths and heads, the same bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import Target, dispatch
from torch_attnkit.cuda import compile, driver, workspace
from torch_attnkit.kernels.prefill.problem import Layout, Problem
from torch_attnkit.kernels.prefill.sm90 import plan
from torch_attnkit.kernels.prefill.sm90.tiles import BITS16, TILES, Dynamic
from torch_attnkit.kernels.scores import Scores
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity.case import Case, arguments, bound

H200 = 132  # multiprocessors
DENSE, PACKED = "flash_attention", "flash_attention_varlen"
SINKS = dict(window=33, sink_tokens=3)
HEADS = [(1, 1), (3, 3), (6, 2), (5, 1), (14, 2), (12, 1)]
DYNAMIC = {key[1:]: tiles.dynamic for key, tiles in TILES.items() if tiles.dynamic}
PLANS = pytest.mark.parametrize("dim", DYNAMIC, ids=lambda dims: f"D{dims[0]}")


def problem(batch: int, queries: int, dim: int = 64, group: int = 4, window: int = -1, **facts) -> Problem:
    nowhere = Layout((), ())
    sizes = (batch, queries, 4096, 8 * group, 8, dim, dim, Scores(dim, window=window), nowhere, nowhere, nowhere)
    return Problem(torch.bfloat16, torch.device("cpu"), *sizes, **dict(causal=True, longest=queries) | facts)


def test_whose_calls():
    choice = DYNAMIC[64, 64]
    capped = dataclasses.replace(problem(4, 4096), scores=Scores(64, softcap=30.0))
    assert plan.dynamic(capped, H200).tile == choice.capped != choice.causal
    # A MB of keys and values a head.
    assert plan.dynamic(problem(4, 4096), H200) == plan.Plan(choice.causal, dynamic=H200, section=16)
    assert plan.dynamic(problem(4, 4096, window=128), H200).tile == choice.window
    assert plan.dynamic(problem(4, 4096, window=1024), H200).tile == choice.wide != choice.window
    assert plan.dynamic(problem(4, 4096, causal=False), H200).tile == choice.full
    assert plan.dynamic(problem(64, 64 * 256, packed=True, longest=512), H200).tile == choice.causal
    for others in (
        problem(1, 768),  # 128 tiles
        problem(4, 4096, group=1),
        problem(4, 4096, group=33, window=128),  # heads that leave an eighth of a tile empty
        problem(4, 4096, dim=256),
        problem(4, 4096, normalize=False),
        problem(4, 4096, dim=128, window=1024),
        problem(4, 4096, dim=128, causal=False),
        problem(4, 4096, scales=(True, False, False)),
    ):
        assert plan.dynamic(others, H200) is None


def test_a_section_of_heads_is_no_larger_than_the_launch():
    few_keys = dataclasses.replace(problem(4, 4096), keys=1)
    assert plan.dynamic(few_keys, H200).section == 4 * 8


@pytest.mark.parametrize("name", [DENSE, PACKED])
@PLANS
def test_paritys_many_tiles_are_dynamic(name, dim, monkeypatch):
    plans, dynamic, op = [], plan.dynamic, dispatch.OPS[name]
    monkeypatch.setattr(plan, "dynamic", lambda *given: plans.append(dynamic(*given)) or plans[-1])
    index = next(i for i, row in enumerate(op.kernels) if "sm90" in row.archs and row.dims["D"] == dim[:1])
    case = Case(name, index, "sm90", "bf16", (("D", dim[0]), ("Dv", dim[1])), ("causal",), "many")
    with compile.recording():
        op.build(op.kernels[index], bound(op, *arguments(case)), Target("sm90"))
    assert [p.dynamic for p in plans] == [H200]


@pytest.fixture(params=[2])
def ptx(request, monkeypatch):
    """A simulated GPU with few multiprocessors, on which a small batch has many tiles; all heads may be dynamic."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    from torch_attnkit.sim import ptx

    monkeypatch.setattr(driver, "sm_count", lambda device: request.param)
    monkeypatch.setattr(plan, "_LEAST_GROUP", 1)
    monkeypatch.setattr(plan, "_PAIRED_HEADS", ())
    monkeypatch.setattr(plan, "_WIDE", 40)
    plans = [dispatch._PLANS[name] for name in (DENSE, PACKED)]
    for kept in plans:
        kept.clear()
    with torch_attnkit.simulate("sm90"):
        yield ptx
    for kept in plans:
        kept.clear()


def _rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _dense(queries: int, keys: int, heads: int, kv_heads: int, dim: int, batch: int = 2) -> list:
    """With sinks. Keys and values are halves of one tensor."""
    k, v = _rows(1, batch, keys, kv_heads, 2 * dim).split(dim, -1)
    return [_rows(2, batch, queries, heads, dim), k, v, _rows(3, heads).float()]


def _packed(len_q: tuple, len_k: tuple, heads: int, kv_heads: int, dim: int) -> list:
    """With sinks, and rows behind the last sequence; those of k and v hold NaN."""
    k, v = _rows(1, sum(len_k) + 9, kv_heads, 2 * dim).split(dim, -1)
    k[sum(len_k) :], v[sum(len_k) :] = torch.nan, torch.nan
    offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in (len_q, len_k)]
    return [_rows(2, sum(len_q) + 2, heads, dim), k, v, *offsets, _rows(3, heads).float()]


def _agrees(name: str, args: list, **kwargs) -> None:
    """With the reference, as parity has it."""
    reference = dispatch.OPS[name].module("reference").reference
    got = getattr(torch.ops.attnkit, name)(*args, **kwargs)
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]
    for part, *three in zip(
        ("out", "lse"), got, reference(*args, **kwargs), reference(*double, **kwargs), strict=False
    ):
        check(part, *three)


MIXED = (40, 1, 0, 70, 3), (61, 131, 20, 4, 0)


def all_dynamic(monkeypatch, dim: tuple[int, int]) -> None:
    """Dynamic where static tiles are faster, too."""
    key, found = (BITS16, *dim), dataclasses.asdict(DYNAMIC[dim])
    every = Dynamic(**{name: getattr(DYNAMIC[dim], name) or DYNAMIC[dim].causal for name in found})
    monkeypatch.setitem(TILES, key, dataclasses.replace(TILES[key], dynamic=every))


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore")
@pytest.mark.seconds(600)
@pytest.mark.sample(8)
class TestSimulated:
    @PLANS
    def test_dense_with_every_feature(self, ptx, dim, monkeypatch):
        """Lengths on both sides, behind which NaN stands; more queries than keys; windows with and without sinks."""
        all_dynamic(monkeypatch, dim)
        args = _dense(70, 150, 8, 2, dim[0])
        padded = [*(t.clone() for t in args), *(torch.tensor(n, dtype=torch.int32) for n in ((100, 150), (0, 20)))]
        for t in padded[1:3]:
            t[0, 100:], t[1, :20] = torch.nan, torch.nan
        with ptx.settings(check=True, seed=dim[0]), ptx.counting() as launches:
            _agrees(DENSE, args, causal=True)
            _agrees(DENSE, args[:3])
            _agrees(DENSE, padded, causal=True, window=33)
            _agrees(DENSE, padded, causal=True, window=60)
            _agrees(DENSE, args, causal=True, **SINKS | dict(window=60))
            _agrees(DENSE, padded, softcap=3.0)
            _agrees(DENSE, args, causal=True, **SINKS)
            for mask in (dict(causal=True), dict(window=33), dict(window=0, causal=True), dict(SINKS)):
                _agrees(DENSE, [_rows(5, 2, 190, 8, dim[0]), *args[1:]], **mask)
        assert [launch.grid for launch in launches] == [(2, 1, 1)] * 11
        assert all("Dynamic" in launch.kernel for launch in launches)

    @PLANS
    @pytest.mark.proof
    def test_packed_with_every_feature(self, ptx, dim, monkeypatch):
        all_dynamic(monkeypatch, dim)
        args = _packed(*MIXED, 8, 2, dim[0])
        with ptx.settings(check=True, seed=dim[0]), ptx.counting() as launches:
            for mask in (
                dict(causal=True),
                {},
                dict(window=33),
                dict(causal=True, window=60),
                dict(causal=True, window=33, softcap=3.0),
                dict(SINKS),
            ):
                _agrees(PACKED, args, **mask)
        assert [launch.grid for launch in launches] == [(2, 1, 1)] * 6
        assert all("Dynamic" in launch.kernel for launch in launches)

    @pytest.mark.sample(21)
    @pytest.mark.parametrize("ptx", [1, 3, 7], indirect=True)
    @pytest.mark.parametrize("heads", HEADS)
    def test_heads_that_do_not_divide_a_tile(self, ptx, heads):
        with ptx.settings(check=True, seed=heads[0]):
            _agrees(DENSE, _dense(130, 130, *heads, 64, batch=3), causal=True)
            _agrees(PACKED, _packed((150, 1, 90), (150, 64, 90), *heads, 64), causal=True, window=40)

    @pytest.mark.parametrize("section", [1, 2, 5])
    def test_sections_of_heads(self, ptx, section, monkeypatch):
        monkeypatch.setattr(plan, "section", lambda problem, sharers: section)
        with ptx.settings(check=True, seed=section):
            _agrees(DENSE, _dense(130, 130, 6, 3, 64, batch=3), causal=True)

    @pytest.mark.parametrize("ptx", [1, 2, 5], indirect=True)
    def test_the_same_bits_whoever_takes_what(self, ptx):
        args, first = _dense(150, 150, 8, 2, 64), None
        for seed in range(3):
            with ptx.settings(check=True, seed=seed):
                got = torch.cat([t.flatten() for t in torch.ops.attnkit.flash_attention(*args, causal=True)])
            first = got if first is None else first
            assert torch.equal(got, first)

    def test_the_counter_is_left_at_zero(self, ptx):
        args = _packed(*MIXED, 8, 2, 64)
        for offsets in ((0, 40, 41, 41, 111, 114), (0, 0, 0, 0, 0, 1), (0, 100, 100, 100, 100, 114)):
            args[3] = torch.tensor(offsets, dtype=torch.int32)
            with ptx.settings(check=True, seed=1):
                _agrees(PACKED, args, causal=True)
        held = [counters for device in workspace._devices.values() for _, counters in device.streams.values()]
        assert held and not any(counters.any() for counters in held)

    def test_nothing_is_read_that_is_not_there(self, ptx):
        """Whatever offsets and lengths say, which no caller should."""
        wild = torch.tensor([-(2**31), -1, 0, 7, 1 << 20, 2**31 - 1], dtype=torch.int32)
        packed, dense = _packed(*MIXED, 8, 2, 64), _dense(70, 150, 8, 2, 64)
        dense += [torch.tensor(n, dtype=torch.int32) for n in ((100, 150), (0, 20))]
        with ptx.settings(check=True, seed=1, waive=("write_after_write",)):
            for seed in range(3):
                gen = torch.Generator().manual_seed(seed)
                for args, positions in ((packed, (3, 4)), (dense, (4, 5))):
                    for at in positions:
                        values = wild[torch.randint(len(wild), args[at].shape, generator=gen)]
                        args[at] = torch.where(torch.rand(args[at].shape, generator=gen) < 0.5, values, args[at])
                torch.ops.attnkit.flash_attention_varlen(*packed, causal=True, window=33)
                torch.ops.attnkit.flash_attention(*dense, window=33)
