"""Which tiles a prefill launch on Hopper has, how many CTAs share them, and what its kernel is compiled for.

Tiles of one head (``tile``, ``signature``) have the static persistent scheduler. Tiles of a KV head's query heads
(PackGQA) have a cluster each, stream-K, or the dynamic persistent scheduler: ``of_cache``, ``of_pages`` and
``dynamic``. Knows sizes alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch_attnkit.core import invariance
from torch_attnkit.core.spec import short
from torch_attnkit.cuda.sm90.clusters import resident_clusters

from ..launch import section
from ..problem import PagedProblem, Problem
from .tiles import BITS16, DYNAMIC, FP8, FP8_KV, SINGLE_TILE, STREAM_K, TILES, Tile, Tiles, smaller

# Of stream-K CTAs: bytes of keys and values that take as long as a work tile's start and end; how many tiles for each
# multiprocessor, and of how many keys, they are used from. docs/lab/prefill.md has the times.
_START_BYTES, _SHARED_FROM, _SHARED_KEYS = 128 << 10, 0.45, 4096
_MOST_CTAS = 8  # of a cluster; every GPU takes so many
# For each multiprocessor and microsecond, in KB and MFLOP: what its copies bring, its share of device memory, what its
# tensor cores do. Fitted to the H200's times of 16 and 64 queries at B 1 to 16 with all cluster sizes, to about 10 %.
_COPIES, _MEMORY, _PRODUCTS = 50.0, 32.0, 7.5
_START, _MERGE = 5.0, 1.0  # microseconds of a CTA beside its blocks, and of a cluster's merge

_SHARED_MEMORY, _BARRIERS = 227 << 10, 2 << 10  # bytes: of a CTA, and what barriers and tile info take of it at most

# Of dynamic CTAs. Dense batches of (D, Dv) whose queries see all keys, of which pairs of CTAs read keys once for two:
# at the limit of power 1x16384 takes 6893 to 6910 us so and 6933 to 7016 dynamic, 2x8192 3490 and 3540 (H200).
_PAIRED_HEADS = ((128, 128),)
_WIDE = 512  # keys of a window; 128 and 1024 were timed
_LEAST_GROUP = 2  # query heads of a KV head: tiles of one head are the static ones
_FILLED = 7 / 8  # of a dynamic tile's rows, which whole queries fill as far as a KV head's query heads allow

# Of pages.
_LEAST_BOX = 8  # keys: what 128 bytes of shared memory are swizzled by. Smaller boxes are rows, which threads copy.
_MOST_BOX = 128
# Tiles of rows of a sequence from which on pairs of CTAs pay: they are 2 % faster than CTAs of one tile each, but the
# last of them is half empty more often, which is half a tile of each sequence, modelled.
_PAIRED_TILES = 24

# Of E4M3. Rows, queries times the query heads of a KV head, up to which keys cross memory once rather than once a head.
# H100, 32/8 heads, D 128, 16 x 64 queries over 8192 keys 226 us for 432; but 4 x 2048 over 8192 1561 for 1218.
_MOST_ROWS = 256
_PROMOTED = 128  # columns of V up to which a thread has registers for a block's share of the output, too


class Plan(NamedTuple):
    """Of tiles that a KV head's query heads share."""

    tile: Tile
    ctas: int = 1  # of a cluster
    stream_k: int = 0  # CTAs with equal runs of all blocks of keys; 0: another scheduler
    dynamic: int = 0  # CTAs that take work tiles from a counter; 0: another scheduler
    box: int = 0  # keys that TMA loads at once, of one page; 0: every thread copies 16 bytes of a row at a time
    section: int = 0  # dynamic, dense: KV heads whose keys share the L2

    @property
    def scheduler(self) -> str:
        return STREAM_K if self.stream_k else DYNAMIC if self.dynamic else SINGLE_TILE


def tiles(problem: Problem) -> Tiles:
    elements = FP8 if problem.dtype.itemsize == 1 else FP8_KV if problem.fp8_kv else BITS16
    return TILES[elements, problem.dim, problem.dim_v]


# Tiles of one head.


def tile(problem: Problem) -> Tile:
    p, choice = problem, tiles(problem)
    fp8 = p.dtype.itemsize == 1
    if p.scores.window >= 0 or (fp8 and p.scores.capped):
        return choice.window
    chosen = choice.causal if p.causal else choice.full
    # Three consumers have 160 registers each: a scale of their own is one too many.
    return smaller(chosen, 96) if fp8 and chosen.tile_m == 192 and any(p.scales) else chosen


def signature(problem: Problem) -> dict[str, Any]:
    """What a kernel is compiled for."""
    p, chosen = problem, tile(problem)
    return {
        **_sizes(p),
        **chosen.of_a_head(),
        "pair": chosen.paired(p.group),
        "causal": p.causal,
        "sink": p.sink,
        "normalize": p.normalize,
        **_promoted(p),
        **({"scales": p.scales} if any(p.scales) else {}),
        **p.scores.features(),
        **_lengths(p),
        **({"ends_at_kv_len": True} if p.cached else {}),
    }


def transpose_signature(problem: Problem, signature: dict[str, Any]) -> dict[str, Any]:
    """What V's transposition ahead of such a kernel is compiled for."""
    names = ("dtype", "dim", "dim_v", "tile_n", "window", "sink_tokens", "kv_len", "kv_start", "ends_at_kv_len")
    return {name: signature[name] for name in names if name in signature} | {"varlen": problem.packed}


def sharers(problem: Problem, signature: dict[str, Any]) -> int:
    """How many work tiles of the same queries share a KV head."""
    return problem.group // (2 if signature["pair"] else 1)


def _sizes(problem: Problem) -> dict[str, Any]:
    return {"dtype": short(problem.dtype), "dim": problem.dim, "dim_v": problem.dim_v}


def _lengths(problem: Problem) -> dict[str, Any]:
    """Where keys lie, and what a dense batch says of them."""
    p = problem
    return {"kv": "packed"} if p.packed else {"kv_len": p.kv_len, "kv_start": p.kv_start}


def _promoted(problem: Problem) -> dict[str, Any]:
    return {"promote": problem.dim_v <= _PROMOTED} if problem.dtype.itemsize == 1 else {}


# Tiles of a KV head's query heads: clusters, and stream-K.


def start(tile: Tile, row_bytes: int) -> int:
    """Blocks of keys that take stream-K CTAs as long as a work tile's start and end; ``row_bytes`` of a key and a
    value."""
    return -(-_START_BYTES // (tile.tile_n * row_bytes))


def shares(problem: Problem, keys: int, sms: int) -> bool:
    """Whether stream-K CTAs share the keys of all sequences, whose lengths may differ; a tile has all rows of one.

    Fewer tiles, or sequences of at most fewer ``keys``, are faster as clusters; D 256 would spill.
    """
    work_tiles = problem.batch * problem.kv_heads
    enough = work_tiles >= _SHARED_FROM * sms and problem.scores.most_keys(keys, problem.longest) >= _SHARED_KEYS
    return problem.batch > 1 and problem.dim_v <= 128 and enough


def cost(tile: Tile, ctas: int, row_tiles: int, groups: int, steps: int, dims: int, sms: int) -> float:
    """Microseconds, roughly, of ``groups`` KV heads with ``row_tiles`` tiles each that visit ``steps`` blocks."""
    total, size = row_tiles * groups, tile.tile_n * dims * 2e-3
    sharing = 1 if total <= resident_clusters(ctas, sms, 1) else tile.per_sm  # on the fullest multiprocessor
    running = min(total * ctas, sms * tile.per_sm)
    step = max(
        size * sharing / _COPIES,
        size * running / row_tiles / (_MEMORY * sms),
        tile.tile_m * tile.tile_n * dims * 2e-6 * sharing / _PRODUCTS,
    )
    rounds = -(-total // max(1, resident_clusters(ctas, sms, tile.per_sm)))
    return rounds * (_START + -(-steps // ctas) * step) + (_MERGE if ctas > 1 else 0.0)


def _bytes(problem: Problem) -> int:
    """Of a key and a value, in units of 16 bits: of 8 bits memory and products are twice as fast."""
    return (problem.dim + problem.dim_v) * problem.dtype.itemsize // 2


def of_cache(problem: Problem, sms: int) -> Plan:
    """For queries at the end of a cache on ``sms`` multiprocessors; a tile's rows are queries times a KV head's query
    heads."""
    p, choice = problem, tiles(problem)
    rows, groups = p.queries * p.group, p.batch * p.kv_heads
    few, many, pairs = choice.few_rows, choice.many_rows, choice.row_pairs
    assert few is not None and many is not None and pairs is not None
    if invariance.is_on():
        return Plan(many)
    chosen = few if rows <= 64 else many
    row_tiles = -(-rows // chosen.tile_m)
    if rows <= few.tile_m and shares(p, p.keys, sms):
        return Plan(chosen, stream_k=sms)
    steps = max(1, -(-p.scores.most_keys(p.keys, p.queries) // chosen.tile_n))
    costs = {n: cost(chosen, n, row_tiles, groups, steps, _bytes(p), sms) for n in range(1, _MOST_CTAS + 1)}
    ctas = min(costs, key=lambda n: costs[n])
    if ctas == 1 and chosen is many and row_tiles % 2 == 0:
        return Plan(pairs, 2)
    return Plan(chosen, ctas)


def group_signature(problem: Problem, plan: Plan, kv: str) -> dict[str, Any]:
    """What a kernel is compiled for whose tiles a KV head's query heads share: of a call's features a soft cap, and
    where the dynamic scheduler has dense or packed batches, those that few calls have; others are scalars."""
    p = problem
    known = {"kv": kv, "scheduler": plan.scheduler, "softcap": p.scores.capped} | _sizes(p) | plan.tile.of_a_group()
    known |= _promoted(p) | ({"scales": (True, True, True)} if p.kv_itemsize == 1 else {})
    known |= {"fp8_kv": True} if p.fp8_kv else {}
    if plan.dynamic:
        known |= {"group": p.group, "q_stages": _query_stages(p, plan.tile)}
    if kv in ("dense", "packed"):
        return known | p.scores.features() | _lengths(p) | {"sink": True}
    known |= dict.fromkeys(("window", "sink_tokens", "kv_start", "ends_at_kv_len"), True)
    # A row's blocks in one order, however its sequence is cut into calls: without a window they are in any case.
    return known | ({"in_order": True} if invariance.is_on() and p.scores.window >= 0 else {})


def _query_stages(problem: Problem, tile: Tile) -> int:
    """Of rows, so that those of the next work tile are loaded ahead: two if there is room."""
    p = problem
    rows, keys = tile.tile_m * p.dim, tile.stages * tile.tile_n * (p.dim + p.dim_v)
    return 2 if (2 * rows + keys) * p.dtype.itemsize + _BARRIERS <= _SHARED_MEMORY // tile.per_sm else 1


def packs_heads(problem: Problem, sms: int) -> bool:
    """Whether queries at the end of a cache of E4M3 share tiles with the other heads of their KV head.

    Else they are a dense batch behind a transposition of V. They do where rows are few, and where the tiles of that, of
    one head each, would leave half of the multiprocessors idle.
    """
    p = problem
    dense = p.batch * p.heads * -(-p.queries // tile(p).tile_m)
    return p.queries * p.group <= _MOST_ROWS or 2 * dense <= sms or invariance.is_on()


# Pages.


def box_of(page: int, tile: Tile) -> int:
    """Boxes divide a page and a tile, of which each CTA of a pair loads its half."""
    box = math.gcd(page, tile.tile_n // (2 if tile.pair else 1), _MOST_BOX)
    return box if box >= _LEAST_BOX else 0


def of_pages(problem: PagedProblem, sms: int) -> Plan:
    """For blocks of queries over pages on ``sms`` multiprocessors.

    How long which sequence is only the device knows. Blocks of queries count as equally long, which decides between
    tiles, and sequences as long as the longest, which decides on clusters.
    """
    p = problem.attention
    choice = tiles(p)
    few, many, pairs, queued = choice.few_rows, choice.many_rows, choice.row_pairs, choice.paged
    assert few is not None and many is not None and pairs is not None
    if invariance.is_on():
        return Plan(many, box=box_of(problem.page, many))
    sequences = max(1, p.batch)
    rows = max(1, min(p.longest, -(-p.queries // sequences))) * p.group
    chosen = few if p.longest * p.group <= few.tile_m else many
    # Where threads copy rows, a scheduler beside them would spill.
    if chosen is few and shares(p, problem.longest_keys, sms) and box_of(problem.page, chosen):
        return Plan(chosen, stream_k=sms, box=box_of(problem.page, chosen))
    row_tiles, groups = -(-rows // chosen.tile_m), sequences * p.kv_heads
    steps = max(1, -(-p.scores.most_keys(problem.longest_keys, p.longest) // chosen.tile_n))
    costs = {n: cost(chosen, n, row_tiles, groups, steps, _bytes(p), sms) for n in range(1, min(_MOST_CTAS, steps) + 1)}
    ctas = min(costs, key=lambda n: costs[n])
    if ctas == 1 and chosen is many:
        if queued and box_of(problem.page, queued) and row_tiles * groups > sms and fills(queued, p.group):
            return Plan(queued, dynamic=sms, box=box_of(problem.page, queued))
        # A pair needs keys that both have, by TMA.
        if pairs.pair and rows > _PAIRED_TILES * pairs.tile_m and box_of(problem.page, pairs):
            return Plan(pairs, 2, box=box_of(problem.page, pairs))
    return Plan(chosen, ctas, box=box_of(problem.page, chosen))


def pages_signature(problem: PagedProblem, plan: Plan) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return group_signature(problem.attention, plan, "paged") | {"page": problem.page, "box": plan.box}


def fills(tile: Tile, group: int) -> bool:
    return tile.tile_m // group * group >= _FILLED * tile.tile_m


# Dense and packed batches of 16 bits with the dynamic scheduler.


def dynamic(problem: Problem, sms: int) -> Plan | None:
    """The plan for ``problem``; None where work tiles are few, or the dynamic scheduler does not take it, or the batch
    must not decide."""
    p = problem
    choice = tiles(p).dynamic
    if invariance.is_on() or choice is None or not p.normalize or any(p.scales) or p.group < _LEAST_GROUP:
        return None
    windowed = p.scores.window >= 0
    chosen = choice.causal if p.causal else choice.full
    if windowed:
        chosen = choice.window if p.scores.window < _WIDE else choice.wide
    if (p.dim, p.dim_v) in _PAIRED_HEADS and not (p.packed or p.causal or windowed):
        return None
    if p.scores.capped and chosen is not None:
        chosen = choice.capped or chosen
    if chosen is None or not fills(chosen, p.group):
        return None
    sequences = max(1, p.batch)
    tokens = min(p.longest, -(-p.queries // sequences)) if p.packed else p.queries
    tile_rows = chosen.tile_m // p.group * p.group
    if -(-tokens * p.group // tile_rows) * sequences * p.kv_heads <= sms:
        return None
    heads = section(p, 1)
    if p.causal:
        heads = max(heads, p.kv_heads)  # the heaviest tiles of a sequence first, whatever its keys take
    return Plan(chosen, dynamic=sms * chosen.per_sm, section=min(heads, sequences * p.kv_heads))
