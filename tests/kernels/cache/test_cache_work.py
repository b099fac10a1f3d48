"""The kernels on cache rows in the simulator, bit for bit: room between rows, slots that are none, shared memory."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.formats import kv_cache
from torch_attnkit.kernels.cache import plan
from torch_attnkit.kernels.cache.problem import Row
from torch_attnkit.sim import ptx

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(300)]

OPS = torch.ops.attnkit
ROWS = [("none", 33, 0), ("fp8", 192, 64), ("nvfp4", 75, 11), ("mxfp4", 512 + 96, 64)]
HOSTILE = (-(2**31), -2, -1, 9, 10, 2**31 - 1)  # of a cache of nine rows


def simulated(name, *args, **kwargs):
    with torch_attnkit.simulate("sm90"), ptx.settings(check=True), ptx.counting() as launches:
        out = getattr(OPS, name)(*args, **kwargs)
    assert len(launches) == 1
    return out, launches[0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; NaN is NaN."""
    equal = a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)
    if not a.is_floating_point():
        return bool(equal.all())
    return bool((equal.view(*a.shape, a.itemsize).all(-1) | (a.isnan() & b.isnan())).all())


def hostile_rows(rows: int, dim: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every size with odd numbers among the NoPE channels."""
    x = torch.randn(rows, dim) * torch.exp2(torch.arange(rows) - rows / 2)[:, None]
    x[0, : dim - rope : 5] = torch.nan
    x[1, : dim - rope : 7], x[1, : dim - rope : 11] = torch.inf, -torch.inf
    x[2, : dim - rope] = torch.nan
    x[3] = -0.0
    return x.to(dtype)


def apart(rows: torch.Tensor, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of random bytes, and in it a tensor like ``rows`` with so many elements before and after each row."""
    width = before + rows.shape[1] + after
    buffer = torch.randint(0, 256, (len(rows), width * rows.itemsize), dtype=torch.uint8).view(rows.dtype)
    view = buffer[:, before : before + rows.shape[1]]
    view.copy_(rows)
    return buffer, view


@pytest.mark.sample(13)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (8, 4), (3, 2)], ids=["dense", "words", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_are_written_and_read_to_the_bit_and_nothing_else_is_touched(row, dtype, before, after):
    format, dim, rope = row
    gs = torch.tensor(731.37) if format == "nvfp4" else None
    kv, slot = hostile_rows(7, dim, rope, dtype), torch.tensor([3, 8, -1, 0, 7, 1, 5])
    size = kv_cache.row_bytes(format, dim, rope)
    empty = torch.randn(9, dim).to(dtype) if format == "none" else torch.randint(0, 256, (9, size), dtype=torch.uint8)
    buffer, cache = apart(empty, before, after)
    want_buffer = buffer.clone()
    want = want_buffer[:, before : before + size]
    for into, call in ((want, OPS.kv_cache_write), (cache, lambda *a, **k: simulated("kv_cache_write", *a, **k))):
        call(kv, into, slot, gs, format=format, rope_dim=rope)
    assert same(buffer, want_buffer)
    for out in {torch.float32, dtype}:
        kwargs = dict(format=format, head_dim=dim, rope_dim=rope, dtype=out)
        got, _ = simulated("kv_cache_gather", cache, slot.int(), gs, **kwargs)
        assert same(got, OPS.kv_cache_gather(cache, slot, gs, **kwargs))


@pytest.mark.sample(3)
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_slots_that_no_cache_has_are_passed_over(row, integer):
    """A CPU refuses them. A kernel cannot look before it runs: it writes nothing for them, and gathers zeros."""
    format, dim, rope = row
    far = (2**40, -(2**40), 2**63 - 1) if integer == torch.int64 else ()
    slot = torch.tensor([4, *HOSTILE, *far, 0], dtype=integer)
    kv, size = torch.randn(len(slot), dim), kv_cache.row_bytes(format, dim, rope)
    cache = torch.full((9, dim), 7.0) if format == "none" else torch.full((9, size), 7, dtype=torch.uint8)
    want = cache.clone()
    OPS.kv_cache_write(kv[[0, -1]], want, slot[[0, -1]], format=format, rope_dim=rope)
    simulated("kv_cache_write", kv, cache, slot, format=format, rope_dim=rope)
    assert same(cache, want)
    kwargs = dict(format=format, head_dim=dim, rope_dim=rope)
    got, _ = simulated("kv_cache_gather", cache, slot, **kwargs)
    assert same(got[[0, -1]], OPS.kv_cache_gather(cache, slot[[0, -1]], **kwargs))
    assert same(got[1:-1], torch.zeros(len(slot) - 2, dim))


def test_a_cache_without_rows():
    slot = torch.tensor([-1, 0, 3])
    got, _ = simulated("kv_cache_gather", torch.zeros(0, 368, dtype=torch.uint8), slot, format="mxfp4", head_dim=512)
    assert same(got, torch.zeros(3, 512))


def test_rows_may_come_from_the_cache_itself():
    """More of them than run at once, each to the place of the next."""
    cache = torch.randn(600, 8)
    want = cache.roll(1, 0)
    simulated("kv_cache_write", cache, cache, (torch.arange(600) + 1) % 600)
    assert torch.equal(cache, want)


def test_numbers_that_lie_in_the_bytes_of_the_cache_are_read_before_they_are_written_over():
    memory = torch.randint(0, 64, (5, 100), dtype=torch.uint8)  # bytes without NaN
    want = memory.clone()
    rows = lambda m: (m[:, 32:96].view(torch.float16), m[:, :68])  # 32 numbers, and rows of 64 RoPE bytes and 4 more
    slot = torch.tensor([1, 2, 3, 4, 0])
    OPS.kv_cache_write(rows(want.clone())[0], rows(want)[1][:, :64], slot, format="fp8", rope_dim=32)
    simulated("kv_cache_write", rows(memory)[0], rows(memory)[1][:, :64], slot, format="fp8", rope_dim=32)
    assert same(memory, want)


@pytest.mark.parametrize(
    ("name", "format", "most"),
    [
        ("kv_cache_write", "fp8", 160), ("kv_cache_write", "nvfp4", 300), ("kv_cache_write", "mxfp4", 295),
        ("kv_cache_gather", "fp8", 175), ("kv_cache_gather", "nvfp4", 215), ("kv_cache_gather", "mxfp4", 200),
    ],
)  # fmt: skip
def test_a_row_takes_few_instructions(name, format, most):
    """Of PTX, for a warp's row of 512 bfloat16 numbers. Seen: 154, 290, 283; 167, 208, 190."""
    slot, kwargs = torch.randperm(64), dict(format=format, rope_dim=64)
    kv, cache = torch.randn(64, 512).bfloat16(), torch.zeros(64, kv_cache.row_bytes(format, 512, 64), dtype=torch.uint8)
    OPS.kv_cache_write(kv, cache, slot, **kwargs)
    if name == "kv_cache_write":
        _, launch = simulated(name, kv, cache, slot, **kwargs)
    else:
        _, launch = simulated(name, cache, slot, head_dim=512, dtype=torch.bfloat16, **kwargs)
    assert launch.counters["instructions"] <= 64 * most


def test_pieces_of_a_row_fit_where_its_parts_lie():
    """584, 380 and 368 bytes; and a row whose RoPE channels are odd in number."""
    pieces = {}
    for format in ("fp8", "nvfp4", "mxfp4"):
        row = Row(format, 512, 64)
        c = plan.encoded(row, 8, row.size & -row.size, 1, 132)
        pieces[format] = c.codes, c.rope
    assert pieces == {"fp8": (8, 8), "nvfp4": (4, 4), "mxfp4": (8, 16)}
    assert plan.encoded(Row("nvfp4", 27, 11), 1, 4, 1, 132).rope == 2
    assert plan.encoded(Row("fp8", 576, 64), 8, 1, 1, 132).codes == 1
