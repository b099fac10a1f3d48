"""Decode with many query heads on a simulated B200: how right it is, and that it reads its keys once in one launch."""

from __future__ import annotations

import pytest
import torch

import torch_attnkit
from torch_attnkit.oracle import inputs
from torch_attnkit.oracle.attention import narrow_products
from torch_attnkit.oracle.compare import check

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("ignore"), pytest.mark.seconds(600)]

E4M3 = torch.float8_e4m3fn
PAGE = 64
EVERYTHING = dict(window=300, sink_tokens=5, softcap=20.0)


def _paged(gen: torch.Generator, cache: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A (B, Hkv, S, D) cache as pages in random order, others full of NaN among them, and the table of its pages.

    Entries beyond a sequence's length name pages that do not exist.
    """
    B, Hkv, S, D = cache.shape
    columns = -(-S // PAGE)
    pages = torch.full((B * columns + 3, PAGE, Hkv, D), torch.nan).to(cache.dtype)
    table = inputs.block_table(gen, lengths, PAGE, len(pages), columns)
    table[table < 0] = 1 << 30
    for b, length in enumerate(lengths.tolist()):
        for j in range(length):
            pages[table[b, j // PAGE], j % PAGE] = cache[b, :, j]
    return pages, table


def _simulated(*args, **options) -> tuple[tuple[torch.Tensor, ...], list]:
    """Results and launches; the op is the paged one if there is a table."""
    from torch_attnkit.sim import ptx

    op = torch.ops.attnkit.sdpa_decode_paged if args[3].dim() == 2 else torch.ops.attnkit.sdpa_decode
    with torch_attnkit.simulate("sm100"), ptx.counting() as launches:
        return op(*args, **options), launches


def _agrees(args: tuple, options: dict, got: tuple[torch.Tensor, ...]) -> None:
    """With the reference of the cache without pages, in float64."""
    with narrow_products():
        ref = torch.ops.attnkit.sdpa_decode(*args, **options)
    double = [a.double() if a is not None and a.dtype == args[0].dtype else a for a in args]
    ref64 = torch.ops.attnkit.sdpa_decode(*double, **options)
    for name, g, r, r64 in zip(("out", "lse"), got, ref, ref64, strict=True):
        check(name, g, r, r64)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_step_of_deepseek_v4_pro_reads_its_keys_once_in_one_launch(paged):
    """128 heads, one KV head, D 512, V is K, 1024 chosen entries and a window of 128."""
    gen = torch.Generator().manual_seed(0)
    q, kv = torch.randn(1, 128, 512, generator=gen).bfloat16(), torch.randn(1, 1, 1152, 512, generator=gen).bfloat16()
    sink, length = torch.randn(128, generator=gen), torch.tensor([1152], dtype=torch.int32)
    pages, table = _paged(gen, kv, length) if paged else (kv, None)
    got, launches = _simulated(q, pages, pages, *([table] if paged else []), length, sink)
    assert len(launches) == 1
    counted = launches[0].counters
    assert counted["tma_read"] == kv.numel() * 2
    assert set(counted["flops"]) == {"f16"} and counted["flops"]["f16"] == 2 * 2 * 128 * 1152 * 512
    assert counted["cp_async"] <= kv.numel() * 2  # Q, by every CTA that has keys
    wanted = torch.ops.attnkit.sdpa_decode(q.double(), kv.double(), kv.double(), length, sink)[0]
    assert torch.cosine_similarity(got[0].double().flatten(), wanted.flatten(), 0) >= 0.999997


def test_a_step_over_codes_does_the_same_on_half_the_bytes():
    gen = torch.Generator().manual_seed(0)
    q, kv = torch.randn(1, 128, 512, generator=gen).to(E4M3), torch.randn(1, 1, 1152, 512, generator=gen).to(E4M3)
    length = torch.tensor([1152], dtype=torch.int32)
    (out, _), (launch,) = _simulated(q, kv, kv, length)
    assert out.dtype == torch.bfloat16
    assert launch.counters["tma_read"] == kv.numel()
    assert launch.counters["flops"] == {"f8f6f4": 2 * 2 * 128 * 1152 * 512}
    assert launch.counters["cp_async"] <= kv.numel()


@pytest.mark.parametrize(("sharp", "most"), [(1.0, 1.0), (4.0, 0.6)], ids=["plain", "sharp"])
def test_codes_err_no_more_than_by_rounding_the_probabilities(sharp, most):
    """Root mean square errors, beside the reference that rounds P by the row's own maximum. Seen: 0.90 and 0.50."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(2, 32, 128, generator=gen).to(E4M3)
    k, v = (torch.randn(2, 2, 1024, 128, generator=gen).to(E4M3) for _ in range(2))
    args, scale = (q, k, v, torch.tensor([1024, 1000], dtype=torch.int32)), sharp * 128**-0.5
    (ours, _), _ = _simulated(*args, scale=scale)
    wide = torch.ops.attnkit.sdpa_decode(*(t.double() for t in args[:3]), args[3], scale=scale)[0]
    with narrow_products():
        emulated = torch.ops.attnkit.sdpa_decode(*args, scale=scale)[0]
    ours, emulated = ((t.double() - wide).square().mean().sqrt().item() for t in (ours, emulated))
    assert ours <= most * emulated


@pytest.mark.sample(32)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "same", "paged"),
    [
        (64, 24, 2, True, False),
        (64, 12, 1, False, True),
        (128, 20, 1, False, False),
        (256, 130, 1, False, True),
        (512, 128, 1, True, True),
        (512, 64, 1, False, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "E4M3"])
def test_ragged_caches_with_every_feature(dim, heads, kv_heads, same, paged, dtype, seed):
    """Checked, in hostile schedules: lengths at the edges of tiles, empty ones, and NaN wherever no key is."""
    from torch_attnkit.sim import ptx

    gen = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([513, 0, 1, 256, 129], dtype=torch.int32)
    starts = torch.tensor([200, 0, 0, 130, 129], dtype=torch.int32)
    B, S = len(lengths), int(lengths.max())
    q = inputs.normal(gen, dtype, B, heads, dim)
    k = inputs.normal(gen, dtype, B, kv_heads, S, dim)
    v = k if same else inputs.normal(gen, dtype, B, kv_heads, S, dim)
    sink = torch.randn(heads, generator=gen)
    scales = inputs.scales(gen, dtype == E4M3, B, kv_heads)
    caches, table = [k, v], []
    if paged:
        pages, rows = _paged(gen, torch.cat([k, v], -1), lengths)
        caches, table = [pages[..., :dim].contiguous(), pages[..., dim:].contiguous()], [rows]
        caches[1] = caches[0] if same else caches[1]
    else:
        caches = [cache.clone() for cache in caches]
        for cache in caches:
            for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                cache[b, :, :start] = float("nan")
                cache[b, :, length:] = float("nan")
        caches[1] = caches[0] if same else caches[1]
    with ptx.settings(check=True, seed=seed):
        got, launches = _simulated(q, *caches, *table, lengths, sink, starts, *scales, **EVERYTHING)
    assert len(launches) == 1 and launches[0].block[0] == 320
    assert not launches[0].notes
    _agrees((q, k, v, lengths, sink, starts, *scales), EVERYTHING, got)


@pytest.mark.sample(8)
@pytest.mark.parametrize("heads", [9, 32, 128])
def test_parts_of_long_and_uneven_groups_merge(heads):
    """More tiles than clusters have CTAs: clusters share groups, and end one where they begin another."""
    from torch_attnkit.sim import ptx

    gen = torch.Generator().manual_seed(heads)
    lengths = torch.tensor([2500, 100, 1900], dtype=torch.int32)
    q = inputs.normal(gen, torch.float16, 3, heads, 64)
    k, v = (inputs.normal(gen, torch.float16, 3, 1, 2500, 64) for _ in range(2))
    with ptx.settings(check=True):
        got, launches = _simulated(q, k, v, lengths)
    assert len(launches) == 1 and launches[0].counters["global_written"] > 2 * got[0].numel() * 2
    _agrees((q, k, v, lengths), {}, got)


def test_more_groups_than_clusters():
    """A cluster then has several pieces, one after the other, and what a piece leaves lies where the next one loads."""
    from torch_attnkit.sim import ptx

    gen = torch.Generator().manual_seed(0)
    lengths = inputs.lengths(gen, 150, 130)
    q = inputs.normal(gen, torch.bfloat16, 150, 16, 512)
    kv = inputs.normal(gen, torch.bfloat16, 150, 1, 130, 512)
    with ptx.settings(check=True, seed=2):
        got, launches = _simulated(q, kv, kv, lengths)
    assert len(launches) == 1
    _agrees((q, kv, kv, lengths), {}, got)


def test_a_cache_without_room():
    q, none = torch.randn(2, 16, 64).bfloat16(), torch.empty(2, 1, 0, 64).bfloat16()
    (out, lse), launches = _simulated(q, none, none, torch.zeros(2, dtype=torch.int32))
    assert not launches and not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "E4M3"])
def test_rows_of_q_at_any_multiple_of_4_bytes(dtype):
    gen = torch.Generator().manual_seed(0)
    wide = inputs.normal(gen, dtype, 2, 20, 68)
    q, length = wide[..., 4:], torch.tensor([90, 128], dtype=torch.int32)
    k, v = (inputs.normal(gen, dtype, 2, 1, 128, 64) for _ in range(2))
    got, _ = _simulated(q, k, v, length)
    _agrees((q, k, v, length), {}, got)
