"""Tile shapes of the prefill kernels on Hopper, in one table: a head size is one entry, which rows and plans read.

Tuned on an H200 in bf16 and on an H100 in E4M3; docs/lab/prefill.md has the figures. What was not timed is said.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

BITS16, FP8 = "bf16 f16", "f8e4m3"  # elements of q, k and v
FP8_KV = "bf16 f16 over f8e4m3"  # elements of q over those of k and v
STATIC, SINGLE_TILE, STREAM_K, DYNAMIC = "static", "single_tile", "stream_k", "dynamic"  # schedulers
_OF_A_HEAD = ("tile_m", "tile_n", "stages", "q_stages", "ping_pong", "late_rescale", "pair")
_OF_A_GROUP = ("tile_m", "tile_n", "stages", "per_sm", "ping_pong", "late_rescale", "pair")


@dataclass(frozen=True, kw_only=True)
class Tile:
    """M rows by N keys of a CTA, and how it works.

    ``stages`` of the rings of K and V, ``q_stages`` of Q's; ``per_sm`` CTAs on a multiprocessor. ``ping_pong``:
    consumers issue their products one after another. ``late_rescale``: the output is rescaled while the scores of the
    next block are computed rather than before. ``pair``: two CTAs, on two heads that share their keys or on two
    neighbouring tiles, load half of every block each, for both, so that the L2 is read half as often.
    """

    tile_m: int
    tile_n: int
    stages: int
    q_stages: int = 1
    per_sm: int = 1
    ping_pong: bool = True
    late_rescale: bool = False
    pair: bool = False

    def paired(self, group: int) -> bool:
        """Whether two CTAs work together; their two heads must share a KV head of ``group`` query heads."""
        return self.pair and group % 2 == 0

    def of_a_head(self) -> dict[str, Any]:
        """What a kernel is compiled for whose tiles are queries of one head."""
        return {name: getattr(self, name) for name in _OF_A_HEAD}

    def of_a_group(self) -> dict[str, Any]:
        """What a kernel is compiled for whose tiles are queries times the heads of a KV head (PackGQA)."""
        return {name: getattr(self, name) for name in _OF_A_GROUP}


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Tiles of the dynamic scheduler: all keys, causal, a window of few keys, of many; None: the static is faster.
    ``capped`` are those of capped scores, if the others would spill."""

    full: Tile | None = None
    causal: Tile | None = None
    window: Tile | None = None
    wide: Tile | None = None
    capped: Tile | None = None


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Of a head size.

    Of one head each: ``full`` where every query sees all keys, ``causal``, ``window``. Of a KV head's query heads:
    ``few_rows`` up to 64, which wait for memory, ``many_rows``, and ``row_pairs`` for so many that they fill the
    machine; None: no such kernel. Of the dynamic scheduler: ``dynamic`` for dense and packed batches, ``paged``.
    """

    full: Tile
    causal: Tile
    window: Tile
    few_rows: Tile | None = None
    many_rows: Tile | None = None
    row_pairs: Tile | None = None
    dynamic: Dynamic | None = None
    paged: Tile | None = None


def split_floats(tile_m: int, dim_v: int) -> int:
    """Of a split in device memory: its rows' numerators, then a maximum, in powers of two, and a sum of each."""
    return tile_m * (dim_v + 2)


def _tile(tile_m: int, tile_n: int, stages: int, **more: Any) -> Tile:
    return Tile(tile_m=tile_m, tile_n=tile_n, stages=stages, **more)


def _alike(tile: Tile, **more: Any) -> Tiles:
    """The same with all keys and causal, and with a window unless ``more`` has others."""
    return Tiles(full=tile, causal=tile, **{"window": tile} | more)


def _groups(few: Tile, many: Tile) -> Tiles:
    """Of a KV head's query heads alone, and without pairs of CTAs."""
    return Tiles(full=many, causal=many, window=many, few_rows=few, many_rows=many, row_pairs=many)


# 14 % over M 128, 5 % over N 112, 3 % over one Q buffer.
_D64 = _tile(192, 128, 4, q_stages=2)
# Dynamic, us for those of a head: causal 4x4096 575 for 615, all keys 1075 for 1117, a window of 128 151 for 241, of
# which N 80 makes two blocks of 8 query heads' 24 queries (N 128: 198). Of one of 1024 N 80 takes 580 and N 128 573.
_D64_DYNAMIC = Dynamic(
    full=_tile(192, 128, 4), causal=_tile(192, 128, 4), window=_tile(192, 80, 6), wide=_tile(192, 128, 4),
    capped=_tile(192, 112, 4),
)  # fmt: skip
# 1 % over pairs, up to 4 % over N 128 with P in shared memory, 3 to 8 % over M 128 in pairs.
_D96 = _tile(192, 112, 3)
# 758 for 813, 1388 for 1474; N 96 767 and 1421, of a window of 1024 378 for N 112's 366, but of 128 100 for 109.
_D96_DYNAMIC = Dynamic(
    full=_tile(192, 112, 3), causal=_tile(192, 112, 3), window=_tile(192, 96, 3), wide=_tile(192, 112, 3),
    capped=_tile(192, 96, 3),
)  # fmt: skip
# 2 % over CTAs alone, 1 % over ping-pong, 1 to 3 % over N 160 and 176, 2 % over a second Q buffer.
_D128 = _tile(128, 128, 2, ping_pong=False, pair=True)
# Causal 8x2048 512 for 523, 1x16384 3531 for 3573, 2x8192 1844 for 1829; packed 64x1..4096 5202 for 5486, all keys 9900
# for 10154. A window of 1024 is even.
_D128_DYNAMIC = _tile(128, 128, 2, ping_pong=False)
# 4 % over rescaling early.
_D256 = _tile(128, 80, 2, late_rescale=True, pair=True)
# In E4M3: 7 % over M 128 and over N 96.
_D64_FP8 = _tile(192, 128, 4, q_stages=2)
# 2 % over pairs, 9 % over no ping-pong (causal), 5 to 7 % over N 96.
_D128_FP8 = _tile(128, 128, 4, q_stages=2)
# 4 % over ping-pong, 7 % over CTAs alone, 9 to 12 % over N 96.
_D256_FP8 = _tile(128, 128, 2, ping_pong=False, pair=True)
# With a window and sink tokens the mask needs more registers than 128 keys leave, and so does a soft cap.
_WINDOW_FP8 = _tile(128, 96, 4, q_stages=2)
# Rows of D 128: few 1 % over one CTA a multiprocessor, many 3 % over three stages, pairs 2 % over no pairs or two
# stages, 4 % over N 96. The other head sizes follow it and were not timed; those of E4M3 are modelled: up to 64 rows
# what two CTAs of a multiprocessor have room for, more, beyond D 64, 96 keys, as for windows. Their stages are those of
# K and of V as it comes; V transposed has two. Dynamic over pages: of D 128 and of 192/128 on an H100 2 % over
# ping-pong, the others over the same without it; of D 32 to 96 6 to 10 % over M 128, of D 256 7 % over N 64.
TILES: dict[tuple[str, int, int], Tiles] = {
    # D a multiple of 16, of E4M3 32, which a product takes at a time; Dv of 32, which the epilogue stores.
    (BITS16, 32, 32): _alike(
        _D64, window=_tile(128, 128, 4, q_stages=2),  # M 192 spills with a window and sink tokens
        few_rows=_tile(64, 128, 4, per_sm=2), many_rows=_tile(128, 128, 4), row_pairs=_tile(128, 128, 4, pair=True),
        dynamic=_D64_DYNAMIC, paged=_tile(192, 128, 4),
    ),
    (BITS16, 64, 64): _alike(
        _D64, window=_tile(128, 128, 4, q_stages=2),  # 21 % over M 192, 2 % over N 64
        few_rows=_tile(64, 128, 3, per_sm=2), many_rows=_tile(128, 128, 4), row_pairs=_tile(128, 128, 4, pair=True),
        dynamic=_D64_DYNAMIC, paged=_tile(192, 128, 4),
    ),
    (BITS16, 96, 96): _alike(
        _D96, window=_tile(128, 128, 2, pair=True),
        few_rows=_tile(64, 64, 4, per_sm=2), many_rows=_tile(128, 128, 2), row_pairs=_tile(128, 128, 3, pair=True),
        dynamic=_D96_DYNAMIC, paged=_tile(192, 96, 3),
    ),
    (BITS16, 128, 128): _alike(
        _D128, window=_tile(128, 128, 2, q_stages=2, pair=True),  # 3 % over CTAs alone
        few_rows=_tile(64, 64, 3, per_sm=2), many_rows=_tile(128, 128, 2),
        row_pairs=_tile(128, 128, 3, ping_pong=False, pair=True),
        dynamic=Dynamic(full=_D128_DYNAMIC, causal=_D128_DYNAMIC), paged=_D128_DYNAMIC,
    ),
    (BITS16, 192, 128): _alike(
        _D128,
        few_rows=_tile(64, 64, 4), many_rows=_tile(128, 128, 2),
        row_pairs=_tile(128, 128, 2, ping_pong=False, pair=True), paged=_tile(128, 128, 2, ping_pong=False),
    ),
    (BITS16, 256, 256): _alike(
        _D256,
        few_rows=_tile(64, 64, 3), many_rows=_tile(128, 64, 2, late_rescale=True),
        row_pairs=_tile(128, 64, 2, late_rescale=True, pair=True), paged=_tile(128, 80, 2, late_rescale=True),
    ),
    # O is split over two warpgroups (mainloop_hdim512.py), both products in halves of whole rows of 128 bytes. Q and
    # every stage take 64 KB. N 64 with one stage needs fewer bytes of shared memory and waits for every block.
    (BITS16, 512, 512): _alike(_tile(64, 32, 2, ping_pong=False, late_rescale=True, pair=True)),
    (FP8, 32, 32): _alike(
        _D64_FP8, window=_tile(128, 128, 4, q_stages=2),
        few_rows=_tile(64, 128, 4, per_sm=2), many_rows=_tile(128, 128, 4), row_pairs=_tile(128, 128, 4, pair=True),
    ),
    (FP8, 64, 64): _alike(
        _D64_FP8, window=_tile(128, 128, 4, q_stages=2),
        few_rows=_tile(64, 128, 4, per_sm=2), many_rows=_tile(128, 128, 4), row_pairs=_tile(128, 128, 4, pair=True),
    ),
    (FP8, 96, 96): _alike(
        _D128_FP8, window=_WINDOW_FP8,
        few_rows=_tile(64, 64, 4, per_sm=2), many_rows=_tile(128, 96, 4), row_pairs=_tile(128, 96, 4, pair=True),
    ),
    (FP8, 128, 128): _alike(
        _D128_FP8, window=_WINDOW_FP8,
        few_rows=_tile(64, 64, 4, per_sm=2), many_rows=_tile(128, 96, 4), row_pairs=_tile(128, 96, 4, pair=True),
    ),
    (FP8, 192, 128): _alike(
        _D128_FP8, window=_WINDOW_FP8,
        few_rows=_tile(64, 96, 4), many_rows=_tile(128, 96, 3), row_pairs=_tile(128, 96, 3, pair=True),
    ),
    (FP8, 256, 256): _alike(
        _D256_FP8, window=_tile(128, 96, 3, ping_pong=False, pair=True),
        few_rows=_tile(64, 64, 4), many_rows=_tile(128, 96, 2), row_pairs=_tile(128, 96, 2, ping_pong=False, pair=True),
    ),
    # Pages alone; stages are those of K and V as they come, widened they have two. D 64 and 128 on an H200: CTAs alone
    # 6 % over pairs (D 64) and 2 to 4 % (D 128); D 128 4 % over N 96 in ping-pong, 3 % over N 112, 14 % over N 80;
    # D 64 3 % over N 112. The others follow them and were not timed.
    (FP8_KV, 32, 32): _groups(_tile(64, 128, 4, per_sm=2), _tile(128, 128, 4)),
    (FP8_KV, 64, 64): _groups(_tile(64, 128, 2, per_sm=2), _tile(128, 128, 4)),
    (FP8_KV, 96, 96): _groups(_tile(64, 64, 3, per_sm=2), _tile(128, 128, 3, ping_pong=False)),
    (FP8_KV, 128, 128): _groups(_tile(64, 64, 2, per_sm=2), _tile(128, 128, 2, ping_pong=False)),
    (FP8_KV, 192, 128): _groups(_tile(64, 64, 4), _tile(128, 80, 2, ping_pong=False)),
    (FP8_KV, 256, 256): _groups(_tile(64, 64, 2), _tile(128, 48, 2, late_rescale=True)),
}  # fmt: skip


def heads(elements: str, *, wide: bool = False) -> list[tuple[int, int]]:
    """(D, Dv) of the entries: those whose output a warpgroup holds alone, or the ``wide`` ones, of which none does."""
    return [(d, dv) for (of, d, dv), tiles in TILES.items() if of == elements and (tiles.few_rows is None) == wide]


def smaller(tile: Tile, tile_n: int) -> Tile:
    """The same with fewer keys."""
    return dataclasses.replace(tile, tile_n=tile_n)
