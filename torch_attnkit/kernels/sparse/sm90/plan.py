"""Launch planning of the Hopper kernel: tile shapes, and a cost model that chooses the split of keys and heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_attnkit.cuda.sm90.clusters import resident_clusters
from torch_attnkit.cuda.sm90.warpgroup import ROWS as HEADS
from torch_attnkit.cuda.workspace import SplitLayout
from torch_attnkit.kernels.cache.problem import Row

from ..problem import Problem

DTYPES = "bf16 f16"
# D, a multiple of 128: keys of a tile, a multiple of 16 up to 64, and tiles in memory.
TILES = {128: (64, 6), 256: (64, 4), 512: (48, 3)}
# Where keys hit L2, since many tokens share them: larger tiles, fewer stages. On an
# H200, D 512, 4096 tokens of 64 heads and 640 keys: 688 us for 734; the other way round for 128 tokens of 8320 keys,
# which come from device memory: 276 us for 283.
REUSED_TILES = {**TILES, 512: (64, 2)}
_REUSED = 32  # reads of a key from which on most hit L2
_L2_BYTES = 32 << 20  # of the caches, most of which stay in a 50 MB L2 beside streamed data
# Dequantised rows: one tile is dequantised and one arrives while two are read.
DEQUANT_TILES = {128: (64, 6), 256: (64, 4), 512: (32, 4)}
# Single pass, D 512: keys of a tile, and tiles; each of three warpgroups dequantises one. With more keys scores would
# be exchanged in two steps: 160 took longer than tile by tile.
SINGLE_PASS_DIM = 512
SINGLE_PASS_TILES, DEQUANT_SINGLE_PASS_TILES = ((48, 1), (80, 1), (112, 1)), ((16, 3), (32, 3))
BULK_TILES = {512: (32, 3)}  # where rows are staged by bulk copies
LEAST_BYTES = 4  # alignment of encoded rows: the shortest cp.async
ALIGNED = 16  # granularity of a CTA's keys: K of an MMA
MOST_CTAS = 8  # the portable cluster size
SIDES = 2  # CTAs of a cluster with the same keys and different heads, which share dequantised rows
# Tokens from which on pairs of head blocks do: fewer would leave most of the GPU idle. On an H100, FP8 rows, 128
# heads, 1152 keys: 64 tokens 62 us for 69, 32 tokens 57 for 45.
PAIRED_TOKENS = 48
# Microseconds, roughly: of a launch, of a work tile beside its keys, alone on a multiprocessor and shared, of a
# cluster's merge, of a key of 512 columns, of joining clusters through device memory, of each of them, and of each
# megabyte that they leave and read there.
_START, _WORK_TILE, _SHARED_WORK_TILE, _MERGE, _KEY = 4.0, 1.0, 3.0, 1.5, 1 / 45
# Of encoded rows, as an H100 took them (docs/lab/sparse.md): a key, and a merge, of which each CTA has a share.
_CODED_KEY, _CODED_MERGE, _CODED_SHARE = 1 / 18, 0.5, 12.0
_JOIN, _SPLIT, _MEGABYTE = 2.0, 0.15, 0.7


@dataclass(frozen=True)
class Plan:
    """What the kernel is compiled with, and how its launch is cut.

    A *work tile* is a token with up to 64 of its heads, of which it has ``head_blocks``. ``groups`` clusters with
    ``ctas`` CTAs for it share its keys, and ``concurrent`` work tiles are attended at a time. The last two are sizes of
    the workspace.
    """

    sizes: dict[str, Any]
    head_blocks: int
    ctas: int
    groups: int
    concurrent: int
    floats: int
    counters: int


class Split(NamedTuple):
    """``groups`` clusters of ``ctas`` CTAs for each of ``sides`` work tiles, which are in one cluster."""

    ctas: int
    groups: int
    sides: int


def bulk_copied(row: Row, align: int) -> bool:
    """Whether rows come by bulk copies, which begin and end at multiples of 16 bytes: what is before the scales does;
    rows that may begin 8 bytes behind one end at one then."""
    if row.format not in ("fp8", "mxfp4") or row.head_dim not in BULK_TILES:
        return False
    return align == 16 or (row.format == "fp8" and align == 8 and row.layout.size % 16 == 8)


def share(keys: int, ctas: int) -> int:
    """Keys of each CTA of a work tile, as ``schedule.share_of`` cuts them."""
    return -(-keys // (ctas * ALIGNED)) * ALIGNED


def reused(problem: Problem) -> bool:
    """Whether keys are in the L2 already when a token asks for them, as far as sizes tell."""
    rows = problem.requests * (problem.capacity + problem.entries)
    nbytes = rows * problem.dim * problem.dtype.itemsize
    return nbytes <= _L2_BYTES and problem.tokens * problem.keys >= _REUSED * rows


def cost(problem: Problem, work: int, sms: int, cut: Split) -> float:
    """Microseconds, roughly, of ``work`` work tiles."""
    ctas, groups, sides = cut
    rounds = -(-work // sides * groups // max(1, resident_clusters(ctas * sides, sms, 1)))
    work_tile = _WORK_TILE if ctas * groups == 1 else _SHARED_WORK_TILE
    keys, merge = share(problem.keys, ctas * groups) * _KEY, _MERGE
    if problem.format != "none":  # whole tiles, at least one per warpgroup
        tile = DEQUANT_TILES[problem.dim][0]
        keys = max(2, -(-share(problem.keys, ctas * groups) // tile)) * tile * _CODED_KEY
        merge = _CODED_MERGE + _CODED_SHARE / ctas
    merge = merge if ctas > 1 else 0.0
    if groups > 1:
        left = work * groups * SplitLayout(min(problem.heads, HEADS), problem.dim).nbytes * 1e-6
        merge += _JOIN + _SPLIT * groups + _MEGABYTE * left
    return _START + rounds * (work_tile + keys * problem.dim / 512) + merge


def _single_pass_tile(problem: Problem, ctas: int, groups: int, sides: int) -> tuple[int, int] | None:
    """Keys of a tile and tiles that a CTA has at once, or None: its share is more, or no CTA sends to it."""
    p = problem
    if p.dim != SINGLE_PASS_DIM or sides > 1 or ctas == 1:
        return None
    tiles = SINGLE_PASS_TILES if p.format == "none" else DEQUANT_SINGLE_PASS_TILES
    # As the kernel counts them: a list may be longer than there are entries.
    most = share(min(p.window, p.capacity) + (p.listed if p.has_list else p.entries), ctas * groups)
    return next(((keys, stages) for keys, stages in tiles if keys * stages >= most), None)


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors."""
    head_blocks = -(-problem.heads // HEADS)
    work, plain = problem.tokens * head_blocks, problem.format == "none"
    paired = not plain and head_blocks % SIDES == 0 and problem.tokens >= PAIRED_TOKENS and sms >= SIDES
    sides = SIDES if paired else 1
    cuts = [
        Split(ctas, groups, sides)
        for ctas in range(1, MOST_CTAS // sides + 1)
        for groups in range(1, max(1, resident_clusters(ctas * sides, sms, 1) * sides // work) + 1)
    ]
    ctas, groups, _ = min(cuts, key=lambda cut: cost(problem, work, sms, cut))
    shared = ctas * groups > 1
    cached = plain and not shared and reused(problem)
    keys, stages = (DEQUANT_TILES if not plain else REUSED_TILES if cached else TILES)[problem.dim]
    single_pass = _single_pass_tile(problem, ctas, groups, sides)
    if single_pass is not None:
        keys, stages = single_pass
    elif bulk_copied(Row(problem.format, problem.dim, problem.rope_dim), problem.align):
        keys, stages = BULK_TILES[problem.dim]
    sizes = dict(
        dim=problem.dim, keys=keys, stages=stages, split_kv=shared,
        # Rows in L2 need no prefetch: the request takes as long as a copy.
        prefetch=plain and not shared and not cached,
        paged=(problem.near_paged, problem.far_paged), format=problem.format, rope_dim=problem.rope_dim,
        align=problem.align, divided=problem.divided, fp4=problem.fp4_signature, sides=sides,
        single_pass=single_pass is not None,
    )  # fmt: skip
    floats = work * groups * SplitLayout(HEADS, problem.dim).floats if groups > 1 else 0
    counters = work * MOST_CTAS if groups > 1 else 0
    concurrent = work if shared else min(work, sms // sides * sides)
    return Plan(sizes, head_blocks, ctas, groups, concurrent, floats, counters)
