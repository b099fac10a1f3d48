"""How a decode launch is cut: tiles, warps, stages and blocks for one signature. Knows sizes, not ops."""

from __future__ import annotations

from dataclasses import dataclass

_SHARED = 227 * 1024  # bytes of shared memory that the blocks of a Hopper SM have together
_RESERVED = 1024  # of which the driver takes this much a block
_LOG2E = 1.4426950408889634
_SHORT = 512  # keys of a group that one block attends alone
_LONG = 200 << 10  # bytes of keys and values for every SM, from which on one block on it with longer tiles is faster
_PER_SM = 2  # blocks on an SM: while one ends a group, the other keeps memory busy


@dataclass(frozen=True)
class Plan:
    """What ``cuda/sm90/decode.py`` is compiled with, and the grid that it runs on."""

    heads: int
    keys: int
    warps: int
    stages: int
    chunks: int
    by_group: int
    least: int
    blocks: int
    floats: int
    counters: int


def plan(dim: int, dim_v: int, group: int, sms: int, most_keys: int, groups: int, paged: bool = False) -> Plan:
    """For ``groups`` KV heads of all sequences with ``group`` query heads each, none attending over ``most_keys`` keys.

    One block an SM with tiles of 32 keys instead of two with 16, H200, 32/8 heads, D 128: 1x8192 15.9 for 17.5 us,
    1x131072 133.5 for 137.6, 16x8192 131 to 136 for 134.2, but 1x1024 9.9 for 8.1; from 64x4096 on they are equal.
    Over pages tiles keep to 16 keys, which lie in one page of 16.
    """
    heads = 8 if group <= 8 or max(dim, dim_v) > 128 else 16
    keys = 32 if dim + dim_v <= 128 else 16
    stage = keys * (2 * dim + 2 * dim_v + 32)
    room = _SHARED // _PER_SM - _RESERVED - 16
    warps = next(w for w in (4, 3, 2, 1) if w * 3 * stage <= room)
    stages = min(room // (warps * stage), 6)
    per_sm = _PER_SM
    by_group = most_keys <= _SHORT
    if by_group:
        stages = 2
        per_sm = min(_SHARED // (warps * stages * stage + _RESERVED + 16), 4 if heads == 8 else 2)
    elif not paged and dim == dim_v == 128 and groups * most_keys * (dim + dim_v) * 2 >= sms * _LONG:
        keys, per_sm = 32, 1
        stages = (_SHARED - _RESERVED - 16) // (2 * warps * stage)
    blocks = sms * per_sm
    return Plan(
        heads, keys, warps, stages, -(-group // heads), int(by_group), 1 if by_group else 2 * warps, blocks,
        2 * blocks * heads * (dim_v + 2), blocks,
    )  # fmt: skip


def score_factors(dim: int, scale: float | None, softcap: float) -> tuple[float, float]:
    """What a product of q and k is multiplied by, and what its capped value is, to be a power of two; 0: no cap."""
    scale = dim**-0.5 if scale is None else scale
    return (scale / softcap, softcap * _LOG2E) if softcap > 0 else (scale * _LOG2E, 0.0)


def bounded(count: int) -> int:
    """A window or number of sink tokens, cut to what no cache exceeds, so that sums with positions stay in 32 bits."""
    return min(count, 1 << 30)
