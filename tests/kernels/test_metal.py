"""What the parity cases do not reach: odd strides and offsets, indices that lie, and what crosses the bus."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.metal_calls import METAL, compare, ints, normal, run
from torch_attnkit.core import dispatch
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.core.support import support
from torch_attnkit.core.target import Target
from torch_attnkit.kernels.decode import metal as decode
from torch_attnkit.kernels.prefill import metal as prefill
from torch_attnkit.mps import launch, library
from torch_attnkit.parity import poison
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = pytest.mark.simulator


def odd(t: torch.Tensor, offset: int = 1, padding: int = 1) -> torch.Tensor:
    """``t`` in a poisoned buffer, its rows ``padding`` elements further apart and ``offset`` elements in."""
    buffer = poison((t[..., 0].numel() * (t.shape[-1] + padding) + offset,), t.dtype, "cpu")
    steps = [t.stride(i) // t.shape[-1] * (t.shape[-1] + padding) for i in range(t.dim() - 1)]
    return buffer.as_strided(t.shape, (*steps, 1), offset).copy_(t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("offset", "padding"), [(1, 1), (2, 4), (4, 3)])
def test_rows_that_no_vector_can_read(dtype: torch.dtype, offset: int, padding: int):
    strided = lambda seed, *shape: odd(normal(seed, *shape, dtype=dtype), offset, padding)
    q, k, v = strided(0, 2, 4, 64), strided(1, 2, 2, 40, 64), strided(2, 2, 2, 40, 80)
    compare("sdpa_decode", (q, k, v, ints(40, 7)))
    q, k, v = strided(0, 2, 9, 4, 64), strided(1, 2, 20, 2, 64), strided(2, 2, 20, 2, 80)
    compare("flash_attention", (q, k, v), causal=True)
    compare("gated_rmsnorm", (strided(0, 3, 5, 40), strided(1, 3, 5, 40), strided(2, 40)))
    compare("merge_partials", (strided(0, 3, 2, 2, 64), normal(1, 3, 2, 2, dtype=torch.float32)))


def test_batch_axes_in_any_order():
    y, z = normal(0, 4, 3, 2, 64).permute(2, 0, 1, 3), normal(1, 3, 2, 4, 64).permute(1, 2, 0, 3)
    compare("gated_rmsnorm", (y, z, normal(2, 64)))


def test_one_offset_more_does_not_need_another_plan():
    """Strides belong to the plan, the storage offset does not: the launch chooses between vectors and elements."""
    op = dispatch.OPS["gated_rmsnorm"]
    y, z, w = normal(0, 4, 64), normal(1, 4, 64), normal(2, 64)
    launch = dispatch.build(op, op.bind((y, z, w, 1e-6)), METAL)
    want, got = torch.empty_like(z), torch.empty_like(z)
    launch(y, z, w, 1e-6, want)
    launch(odd(y, padding=0), z, w, 1e-6, got)
    assert torch.equal(got, want)  # sums in another order, to float32's bits: none of them moves a rounding to float16


def test_lengths_and_pages_that_lie_stay_inside():
    """A reference would refuse them; a kernel cannot look, so it reads what exists and nothing else."""
    q, pages = normal(0, 3, 4, 64), normal(1, 5, 16, 2, 64)
    table = ints(*(7, -3, 2, 1, 0, 1000, 2, 3, 4)).reshape(3, 3)
    with metal.settings(mode="checked", strict=True):
        out, lse = run("sdpa_decode_paged", (q, pages, pages, table, ints(48, 1000, -5)))
        assert out.isfinite().all() and lse[2].eq(-torch.inf).all() and out[2].eq(0).all()
        cache = normal(1, 3, 2, 20, 64)
        out, lse = run("sdpa_decode", (q, cache, cache, ints(20, 1000, -5), None, ints(-9, 3, 2)))
        assert out.isfinite().all() and lse[2].eq(-torch.inf).all()
        keys = normal(2, 30, 2, 64)
        out, lse, _ = run("flash_attention_varlen", (normal(3, 20, 4, 64), keys, keys, ints(0, 9, 99), ints(0, 40, 9)))
        assert out.isfinite().all()


@pytest.mark.parametrize("shared", [1, 4, 8, 16])
def test_decode_reads_a_key_and_a_value_once_for_all_heads(shared: int):
    q, k, v = normal(0, 1, 2 * shared, 64), normal(1, 1, 2, 600, 64), normal(2, 1, 2, 600, 64)
    with metal.counting() as reports:
        run("sdpa_decode", (q, k, v, ints(600)))
    assert [r.kernel for r in reports] == ["decode_rows", "decode_merge"]
    assert reports[0].buffers["k"] == reports[0].buffers["v"] == (k.numel() * 2, 0)


def test_decode_of_more_heads_than_a_tile_holds_finds_its_keys_in_a_cache():
    """64 heads are four tiles of 16 rows, which follow each other on the same keys: memory is read once."""
    q, k, v = normal(0, 1, 64, 64), normal(1, 1, 1, 8000, 64), normal(2, 1, 1, 8000, 64)
    with metal.counting() as reports, metal.settings(cache=k.nbytes // 4):
        run("sdpa_decode", (q, k, v, ints(8000)))
    (rows, _), least = reports, k.nbytes + v.nbytes
    assert rows.buffers["k"] == rows.buffers["v"] == (4 * k.nbytes, 0)
    assert least <= rows.memory_read <= 1.01 * least


def test_decode_reads_what_the_window_leaves():
    q, k, v = normal(0, 1, 8, 64), normal(1, 1, 1, 4000, 64), normal(2, 1, 1, 4000, 64)
    with metal.counting() as reports:
        run("sdpa_decode", (q, k, v, ints(3000)), window=100, sink_tokens=4)
    assert reports[0].buffers["k"] == (104 * 64 * 2, 0)


def test_causal_prefill_skips_the_tiles_above_the_diagonal():
    q, k, v = (normal(seed, 1, 512, 1, 64) for seed in range(3))
    with metal.counting() as reports:
        run("flash_attention", (q, k, v), causal=True)
    pairs = 512 * 513 // 2
    tiles = 512 // 128
    assert reports[0].matrix_flops <= 1.1 * 2 * pairs * 128
    read = reports[0].buffers["k"][0] + reports[0].buffers["v"][0]
    assert read == 2 * 64 * 2 * 128 * tiles * (tiles + 1) // 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 1), (torch.bfloat16, 4)])
def test_nothing_is_known_to_keep_apples_compiler_from_the_sources(dtype: torch.dtype, width: int):
    """For macOS 14 (Metal 3.1) and later, and in threadgroup memory that every GPU has."""
    norm = dict(Y_TYPE=torch.float32, Z_TYPE=dtype, W_TYPE=dtype, WIDTH=width, ROWS=1, SIMDS=2, KEPT=2, RANK=2)
    rows = dict(TYPE=dtype, OUT_TYPE=dtype, MERGED_TYPE=dtype, DIM=64, DIM_V=80, TILES=2, WIDTH=width, CODES=0)
    tiles = dict(TYPE=dtype, OUT_TYPE=dtype, CODES=0, DIM=64, DIM_V=80, TILES=2, SIMDS=4, KEYS=16, WIDTH=width)
    tiles |= dict(IN_CACHE=0)
    codes = dict(TYPE=torch.float8_e4m3fn, OUT_TYPE=torch.bfloat16, CODES=1)
    sources = {
        "gated_rmsnorm": [norm],
        "merge_partials": [dict(IN_TYPE=dtype, OUT_TYPE=torch.float16, WIDTH=width)],
        "sdpa_decode": [rows, rows | dict(CODES=1), rows | codes],
        "sdpa_decode_paged": [rows, rows | dict(CODES=1), rows | codes],
        "sdpa_multi": [rows | dict(MANY=0), tiles | dict(MANY=1, IN_CACHE=1), tiles | codes | dict(MANY=1, IN_CACHE=1)],
        "flash_attention": [tiles, tiles | codes],
        "flash_attention_varlen": [tiles, tiles | codes],
        "flash_attention_paged": [tiles | dict(IN_CACHE=1)],
    }
    for op, variants in sources.items():
        for defines in variants:
            text = library.source(op, defines)
            assert [str(f) for f in lint(text)] == []
            compiled = metal.compile_shader(text)
            for kernel in dir(compiled):
                assert getattr(compiled, kernel).static_thread_group_memory_length <= 32768


def test_more_rows_than_a_grid_counts_along_one_axis(monkeypatch: pytest.MonkeyPatch):
    """2^27 rows, a simdgroup each, are 2^32 threads; and a grid of several rows of threadgroups misses none."""
    launched: list[tuple[int, int, int]] = []
    pipeline = SimpleNamespace(max_threads_per_threadgroup=1024)
    stub = library.Library(SimpleNamespace(merge_partials=pipeline), {"merge_partials": 0})
    original = launch.launcher
    with monkeypatch.context() as patch:
        patch.setattr(library, "load", lambda *args, **defines: stub)
        patch.setattr(launch, "launcher", lambda *args: launched.append(args[2]) or original(*args))
        parts = torch.empty(2, 1 << 20, 128, 16, device="meta")
        record = dispatch.OPS["merge_partials"]
        dispatch.build(record, record.bind((parts, parts[..., 0].contiguous(), None, None, None)), METAL)
    assert launched == [(1 << 24, 2, 1)]
    monkeypatch.setattr("torch_attnkit.kernels.merge.metal._COLUMNS", 3)
    compare("merge_partials", (normal(0, 3, 5, 4, 130), normal(1, 3, 5, 4, dtype=torch.float32)))


MEMORY = 32768  # bytes of a threadgroup


@pytest.mark.sample(4)
@pytest.mark.parametrize("shared", [8, 9, 16])
@pytest.mark.parametrize("dim_v", [16, 128, 144])
@pytest.mark.parametrize("op", ["sdpa_decode", "sdpa_decode_paged"])
def test_decode_of_the_widest_heads(op: str, dim_v: int, shared: int):
    """Two tiles of 8 rows of 512 dims are more than a threadgroup's memory."""
    q, k, v = normal(0, 1, shared, 512), normal(1, 1, 1, 48, 512), normal(2, 1, 1, 48, dim_v)
    if op == "sdpa_decode":
        compare(op, (q, k, v, ints(41)))
    else:
        compare(op, (q, *(t.view(3, 16, 1, -1) for t in (k, v)), ints(2, 0, 1).view(1, 3), ints(41)))


def _sized(op: str, dtype: torch.dtype, dim: int, dim_v: int, shared: int) -> dict[str, torch.Tensor]:
    """Arguments of an attention op that have sizes and nothing else."""
    of = lambda *shape: torch.empty(*shape, dtype=dtype, device="meta")
    counts = lambda *shape: torch.empty(*shape, dtype=torch.int32, device="meta")
    if op == "flash_attention_paged":
        caches = dict(k_cache=of(20, 16, 1, dim), v_cache=of(20, 16, 1, dim_v))
        return dict(q=of(40, shared, dim), cu_seqlens_q=counts(2), block_table=counts(1, 20), kv_len=counts(1)) | caches
    if op.startswith("flash"):
        batch = () if op.endswith("varlen") else (1,)
        given = dict(q=of(*batch, 40, shared, dim), k=of(*batch, 40, 1, dim), v=of(*batch, 40, 1, dim_v))
        return given | (dict(cu_seqlens_q=counts(2), cu_seqlens_k=counts(2)) if op.endswith("varlen") else {})
    q = of(1, 4, shared, dim) if op == "sdpa_multi" else of(1, shared, dim)
    caches = [(1, 1, 320, d) if op != "sdpa_decode_paged" else (20, 16, 1, d) for d in (dim, dim_v)]
    given = dict(q=q, k_cache=of(*caches[0]), v_cache=of(*caches[1]), kv_len=counts(1))
    return given | (dict(block_table=counts(1, 20)) if op == "sdpa_decode_paged" else {})


def _memory(defines: dict[str, Any]) -> int:
    dim, dim_v = defines["DIM"], defines["DIM_V"]
    if "KEYS" in defines:
        held = prefill.held_bytes(1 if defines["CODES"] else defines["TYPE"].itemsize)
        return prefill.threadgroup_bytes(dim, dim_v, held, defines["KEYS"])
    return decode.threadgroup_bytes(dim, dim_v, defines["TILES"])


ATTENTION = dict.fromkeys(op.name for op, _, row, _ in support("metal") if "D" in row.dims and "Dv" in str(op.dims))


@pytest.mark.parametrize("op", ATTENTION)
def test_every_size_that_a_row_accepts_fits_in_threadgroup_memory(op: str, monkeypatch: pytest.MonkeyPatch):
    """All head dims, value dims and dtypes, with groups of one tile and of several: up to the compiler, which is not
    asked."""
    built: list[dict[str, Any]] = []
    pipeline = SimpleNamespace(max_threads_per_threadgroup=256)

    def load(name: str, target: Target, **defines: Any) -> library.Library:
        built.append(defines)
        kernels = ("decode_rows", "decode_merge", "prefill_rows")
        return library.Library(SimpleNamespace(**dict.fromkeys(kernels, pipeline)), dict.fromkeys(kernels, 0))

    monkeypatch.setattr(library, "load", load)
    record, count = dispatch.OPS[op], 0
    for row in (r for r in record.kernels if r.on == "mps"):
        sizes = itertools.product(row.dtypes.split(), row.dims["D"], range(16, 513, 16), (1, 2, 9, 16, 17, 128))
        for dtype, dim, dim_v, shared in sizes:
            given = _sized(op, DTYPES[dtype], dim, dim_v, shared)
            call = record.bind(tuple(given.get(n, record.defaults.get(n)) for n in record.argnames))
            if row.refusal(call) is None:
                record.build(row, call, METAL)
                count += 1
    assert count >= 3 * 7 * 16 * 6 and len(built) == count
    assert {d["DIM"] for d in built} >= {32, 256} and max(map(_memory, built)) <= MEMORY


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("op", "kernel", "defines"),
    [
        ("sdpa_decode", "decode_rows", dict(DIM=512, DIM_V=16, TILES=1)),
        ("sdpa_decode", "decode_rows", dict(DIM=64, DIM_V=128, TILES=2)),
        ("flash_attention", "prefill_rows", dict(DIM=256, DIM_V=256, TILES=1, KEYS=8)),
        ("flash_attention", "prefill_rows", dict(DIM=64, DIM_V=80, TILES=2, KEYS=24)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_the_host_knows_how_much_memory_a_threadgroup_takes(op: str, kernel: str, defines: Any, dtype: torch.dtype):
    codes = dtype == torch.float8_e4m3fn
    stored = torch.bfloat16 if codes else dtype
    given = dict(TYPE=dtype, OUT_TYPE=stored, MERGED_TYPE=stored, SIMDS=2, WIDTH=4, IN_CACHE=0, CODES=codes) | defines
    compiled = metal.compile_shader(library.source(op, given))
    assert getattr(compiled, kernel).static_thread_group_memory_length == _memory(given)


@pytest.mark.parametrize("dim", prefill.DIMS)
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_leave_room_for_a_second_threadgroup(dim: int, size: int):
    keys = prefill.keys_of(dim, dim, size)
    assert keys % 8 == 0 and keys * (2 * dim * size + 64) <= (16384 if dim * size < 1024 else 32768)


def test_splits_grow_with_the_cache_and_shrink_with_the_batch():
    assert [decode.splits_of(n, 8) for n in (0, 1, 256, 257, 8192, 1 << 20)] == [1, 1, 1, 2, 32, 64]
    assert decode.splits_of(8192, 4096) == 1
