"""Cache rows on Metal, bit for bit: room between rows, slots that are none, shared memory, tiny numbers."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import dispatch
from torch_attnkit.formats import kv_cache
from torch_attnkit.mps import library
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(300)]

OPS = torch.ops.attnkit
ROWS = [("none", 33, 0), ("fp8", 192, 64), ("nvfp4", 75, 11), ("mxfp4", 512 + 96, 64)]
HOSTILE = (-(2**31), -2, -1, 9, 10, 2**31 - 1)  # of a cache of nine rows


def simulated(name, *args, flushed=True, **kwargs):
    """On a machine that takes subnormal numbers for zero, as Apple GPUs do."""
    torch.set_flush_denormal(flushed)
    try:
        with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
            return getattr(OPS, name)(*args, **kwargs)
    finally:
        torch.set_flush_denormal(False)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits; NaN is NaN."""
    equal = a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)
    if not a.is_floating_point():
        return bool(equal.all())
    return bool((equal.view(*a.shape, a.itemsize).all(-1) | (a.isnan() & b.isnan())).all())


def hostile_rows(rows: int, dim: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every size, down to subnormal numbers, with odd ones among the NoPE channels."""
    x = torch.randn(rows, dim) * torch.exp2(torch.arange(rows) * 18.0 - 140)[:, None]
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


@pytest.mark.sample(9)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (8, 4), (3, 2)], ids=["dense", "words", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_are_written_and_read_to_the_bit_and_nothing_else_is_touched(row, dtype, before, after):
    format, dim, rope = row
    gs = torch.tensor(731.37) if format == "nvfp4" else None
    kv, slot = hostile_rows(9, dim, rope, dtype), torch.tensor([3, 8, -1, 0, 7, 1, 5, 2, 4])
    size = kv_cache.row_bytes(format, dim, rope)
    empty = torch.randn(9, dim).to(dtype) if format == "none" else torch.randint(0, 256, (9, size), dtype=torch.uint8)
    buffer, cache = apart(empty, before, after)
    want_buffer = buffer.clone()
    want = want_buffer[:, before : before + size]
    for into, call in ((want, OPS.kv_cache_write), (cache, lambda *a, **k: simulated("kv_cache_write", *a, **k))):
        call(kv, into, slot, gs, format=format, rope_dim=rope)
    assert same(buffer, want_buffer)
    for out in (torch.float32, dtype):
        kwargs = dict(format=format, head_dim=dim, rope_dim=rope, dtype=out)
        got = simulated("kv_cache_gather", cache, slot.int(), gs, **kwargs)
        assert same(got, OPS.kv_cache_gather(cache, slot, gs, **kwargs))


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_under_every_power_of_two(format, out):
    """Down to 2^-149, which bfloat16 rounds, and up to infinity."""
    block = kv_cache.BLOCK[format]
    codes = torch.arange(256, dtype=torch.uint8).view(-1, block if format == "fp8" else block // 2)
    rows = [torch.cat([codes[i].expand(256, -1), torch.arange(256).view(-1, 1), torch.zeros(256, 3)], 1) for i in
            range(len(codes))]  # fmt: skip
    cache = torch.cat(rows).to(torch.uint8)
    kwargs = dict(format=format, head_dim=block, rope_dim=0, dtype=out)
    slot = torch.arange(len(cache))
    assert same(simulated("kv_cache_gather", cache, slot, **kwargs), OPS.kv_cache_gather(cache, slot, **kwargs))


def test_every_e4m3_of_bfloat16():
    """Blocks whose amax has every significand, and numbers down to what is 0 under its scale."""
    significands = 1 + torch.arange(128) / 128
    values = torch.cat([significands * 2.0**e for e in range(-18, 1)])  # (2432,)
    values = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    for top in (1.0, 1.75, 1.7578125):
        x = torch.cat([values, torch.full((len(values), 1), 2 * top)], 1).bfloat16()
        x[:, ::2] *= -1
        for by in (1.0, 2.0**-126):
            kv, slot = x * by, torch.arange(len(x))
            want, got = (torch.zeros(len(x), 68, dtype=torch.uint8) for _ in range(2))
            OPS.kv_cache_write(kv, want, slot, format="fp8", rope_dim=0)
            simulated("kv_cache_write", kv, got, slot, format="fp8", rope_dim=0)
            assert same(got, want)


@pytest.mark.parametrize("row", ROWS[::2], ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_slots_that_no_cache_has_are_passed_over(row, integer):
    """A CPU refuses them. A kernel cannot look before it runs: it writes nothing for them, and gathers zeros."""
    format, dim, rope = row
    far = (2**40, -(2**40), 2**63 - 1, 2**32) if integer == torch.int64 else ()
    slot = torch.tensor([4, *HOSTILE, *far, 0], dtype=integer)
    kv, size = torch.randn(len(slot), dim), kv_cache.row_bytes(format, dim, rope)
    cache = torch.full((9, dim), 7.0) if format == "none" else torch.full((9, size), 7, dtype=torch.uint8)
    want = cache.clone()
    OPS.kv_cache_write(kv[[0, -1]], want, slot[[0, -1]], format=format, rope_dim=rope)
    simulated("kv_cache_write", kv, cache, slot, format=format, rope_dim=rope)
    assert same(cache, want)
    kwargs = dict(format=format, head_dim=dim, rope_dim=rope)
    got = simulated("kv_cache_gather", cache, slot, **kwargs)
    assert same(got[[0, -1]], OPS.kv_cache_gather(cache, slot[[0, -1]], **kwargs))
    assert same(got[1:-1], torch.zeros(len(slot) - 2, dim))


def test_a_cache_without_rows():
    slot = torch.tensor([-1, 0, 3])
    got = simulated("kv_cache_gather", torch.zeros(0, 368, dtype=torch.uint8), slot, format="mxfp4", head_dim=512)
    assert same(got, torch.zeros(3, 512))


def test_rows_may_come_from_the_cache_itself():
    """Each to the place of the next; and numbers that lie in the bytes of a cache."""
    cache = torch.randn(60, 8)
    want = cache.roll(1, 0)
    simulated("kv_cache_write", cache, cache, (torch.arange(60) + 1) % 60)
    assert torch.equal(cache, want)
    memory = torch.randint(0, 64, (5, 100), dtype=torch.uint8)  # bytes without NaN
    want = memory.clone()
    rows = lambda m: (m[:, 32:96].view(torch.float16), m[:, :64])  # 32 numbers, and rows of 32 RoPE channels
    slot = torch.tensor([1, 2, 3, 4, 0])
    OPS.kv_cache_write(rows(want.clone())[0], rows(want)[1], slot, format="fp8", rope_dim=32)
    simulated("kv_cache_write", *rows(memory), slot, format="fp8", rope_dim=32)
    assert same(memory, want)


@pytest.mark.parametrize("format", ["none", "fp8", "nvfp4", "mxfp4"])
def test_a_row_crosses_the_bus_once(format):
    """Of 512 channels, 64 of them RoPE; the scale bytes are read by all lanes of a block."""
    kv, size = torch.randn(32, 512).bfloat16(), kv_cache.row_bytes(format, 512, 64) * (2 if format == "none" else 1)
    cache = torch.zeros(32, size, dtype=torch.uint8)
    cache = cache.view(torch.bfloat16) if format == "none" else cache
    for op in ("kv_cache_write", "kv_cache_gather"):
        dispatch._PLANS[op].clear()
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        OPS.kv_cache_write(kv, cache, torch.arange(32), format=format)
        OPS.kv_cache_gather(cache, torch.arange(32), format=format, head_dim=512, dtype=torch.bfloat16)
    write, gather = reports
    assert write.buffers["numbers"] == (kv.nbytes, 0) and write.buffers["cache"] == (0, 32 * size)
    again = {"none": 0, "fp8": 7 * 7, "nvfp4": 28, "mxfp4": 14 * 3}[format]  # reads of a scale byte beyond the first
    padding = {"none": 0, "fp8": 1, "nvfp4": 0, "mxfp4": 2}[format]
    assert gather.buffers["numbers"] == (0, kv.nbytes)
    assert gather.buffers["cache"] == (32 * (size + again - padding), 0)
    assert all(r.barriers == 0 for r in reports)


@pytest.mark.proof
@pytest.mark.parametrize("format", range(4))
def test_nothing_is_known_to_keep_apples_compiler_from_the_sources(format: int):
    for dtype, wide in ((torch.float32, 1), (torch.bfloat16, 0), (torch.float16, 1)):
        defines = dict(TYPE=dtype, WIDE_SLOTS=wide, FORMAT=format, GLOBAL=wide, DIM=100, WIDTH=8 if wide else 1)
        if format == 0:
            defines |= dict(CACHE_TYPE=dtype, WORDS=0)
        else:
            row = kv_cache.row_layout(kv_cache.FORMATS[format], 100, 36)
            parts = dict(zip(("ROPE_AT", "SCALES_AT", "END", "SIZE"), row, strict=True))
            defines |= parts | dict(NOPE=64, BLOCK=kv_cache.BLOCK[kv_cache.FORMATS[format]], WORDS=wide)
        for op in ("kv_cache_write", "kv_cache_gather"):
            assert [str(f) for f in lint(library.source(op, defines))] == []
