"""Decode over one tensor that is keys and values: 512 columns have a kernel of their own, checked as it runs."""

import pytest
import torch

import torch_attnkit
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.oracle.compare import check

# Warnings of the compiler are its own affair.
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default")]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def contiguous() -> tuple[str, list, dict]:
    """Two KV heads; keys that no query sees hold NaN; q's rows are aligned to 4 bytes only."""
    k = normal(3, 2, 700, 512, seed=1)
    for b, (start, end) in enumerate(((0, 690), (7, 31), (70, 449))):
        k[b, :, :start], k[b, :, end:] = torch.nan, torch.nan
    q = normal(3, 40, 514)[:, :, :512]
    return "sdpa_decode", [q, k, k, ints(690, 31, 449), normal(40, seed=2).float(), ints(0, 7, 70)], {}


def two_chunks() -> tuple[str, list, dict]:
    """More heads than a block has, two sequences that are cut and one without keys; capped scores."""
    k = normal(3, 1, 900, 512, seed=1)
    return "sdpa_decode", [normal(3, 100, 512), k, k, ints(900, 0, 333)], dict(softcap=5.0, window=500, sink_tokens=9)


def long() -> tuple[str, list, dict]:
    """So many splits that several threads add up some of them each."""
    k = normal(2, 1, 2500, 512, seed=1)
    return "sdpa_decode", [normal(2, 24, 512), k, k, ints(2500, 333), normal(24, seed=2).float()], {}


def short() -> tuple[str, list, dict]:
    """No sequence is cut."""
    k = normal(2, 1, 70, 512, seed=1)
    return "sdpa_decode", [normal(2, 16, 512), k, k, ints(70, 65)], {}


def paged() -> tuple[str, list, dict]:
    k, table = normal(80, 16, 1, 512, seed=1), torch.randperm(80, generator=torch.Generator().manual_seed(0))
    return "sdpa_decode_paged", [normal(2, 70, 512), k, k, table.to(torch.int32).view(2, 40), ints(600, 77)], {}


def pages(size: int) -> tuple[str, list, dict]:
    """Pages that a tile's keys straddle or have to themselves; what no query sees is NaN, and the table is wild behind
    the lengths."""
    many = -(-330 // size)
    k = torch.full((2 * many + 1, size, 1, 512), torch.nan).bfloat16()
    order = torch.randperm(2 * many, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(2, many)
    for b, (start, end) in enumerate(((0, 321), (130, 205))):
        for key in range(start, end):
            k[order[b, key // size], key % size] = normal(1, 512, seed=key)
        order[b, -(-end // size) :] = 2**31 - 1
    return "sdpa_decode_paged", [normal(2, 20, 512), k, k, order, ints(321, 205), None, ints(0, 130)], {}


def pages_16() -> tuple[str, list, dict]:
    return pages(16)


def pages_48() -> tuple[str, list, dict]:
    return pages(48)


def pages_64() -> tuple[str, list, dict]:
    return pages(64)


def windows() -> tuple[str, list, dict]:
    """The keys of a short and of a cut sequence begin and end inside tiles; one KV head's keys are both heads'."""
    k = normal(3, 1, 700, 512, seed=1).expand(3, 2, 700, 512)
    return "sdpa_decode", [normal(3, 32, 512), k, k, ints(700, 49, 1)], dict(window=203, sink_tokens=51)


def no_keys() -> tuple[str, list, dict]:
    """A cache without rows, of which a tensor map for TMA cannot be made."""
    k = normal(2, 1, 0, 512)
    return "sdpa_decode", [normal(2, 16, 512), k, k, ints(0, 0)], {}


def no_pages() -> tuple[str, list, dict]:
    k = normal(0, 16, 1, 512)
    return "sdpa_decode_paged", [normal(2, 16, 512), k, k, ints(0, 0).view(2, 1), ints(0, 0)], {}


CASES = [contiguous, two_chunks, long, short, paged, pages_16, pages_48, pages_64, windows, no_keys, no_pages]


@pytest.mark.sample(15)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_tensor_is_keys_and_values(case):
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    name, args, kwargs = case()
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True, seed=1):
        got = getattr(torch.ops.attnkit, name)(*args, **kwargs)
    reference = OPS[name].module("reference").reference
    clean = [a.nan_to_num() if isinstance(a, torch.Tensor) else a for a in args]
    double = [a.double() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in clean]
    for what, ours, low, high in zip(
        ("out", "lse"), got, reference(*clean, **kwargs), reference(*double, **kwargs), strict=True
    ):
        check(f"{name} {what}", ours, low, high)


@pytest.mark.parametrize("case", [two_chunks, long], ids=lambda case: case.__name__)
def test_splits_are_joined_by_whoever_runs(case):
    """In the same order: where blocks do not run at once, the last joins what the others gave up waiting for."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    name, args, kwargs = case()
    call = getattr(torch.ops.attnkit, name)
    found = []
    for processors in (132, 132, 40, 1):
        with torch_attnkit.simulate("sm90"), ptx.settings(seed=1 + len(found), processors=processors):
            found.append(call(*args, **kwargs))
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one, strict=True))


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_without_pages_no_length_is_believed(arch):
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    ptx = pytest.importorskip("torch_attnkit.sim.ptx")
    k, table = normal(0, 16, 1, 512), ints(0, 1, 2, 3).view(2, 2)
    with torch_attnkit.simulate(arch), ptx.settings(check=True, seed=1):
        out, lse = torch.ops.attnkit.sdpa_decode_paged(normal(2, 16, 512), k, k, table, ints(32, 2**31 - 1))
    assert (out == 0).all() and (lse == -torch.inf).all()
