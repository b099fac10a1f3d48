"""How a decode launch on Blackwell is cut. Knows sizes, not ops; imports no cutlass."""

from __future__ import annotations

from ..decode_plan import FEW, Plan, narrow, paged

_SHARED = 227 * 1024  # bytes of shared memory that a block may have
_SMALL = 4 * 1024  # of which statistics and barriers take less than this
_KEYS = 128  # of a tile
_DIMS = (64, 128, 256, 512)
_MOST_HEADS = 64  # of a CTA
_CLUSTER = 8  # CTAs of a cluster that every GPU can place
_AT_ONCE = 8  # buffers on the way, 128 or 256 KB: more than memory's latency needs


def plan(
    dim: int, dim_v: int, group: int, sms: int, most_keys: int, groups: int, page: int = 0, *, same: bool = False,
    size: int = 2,
) -> Plan:  # fmt: skip
    """For ``groups`` KV heads of all sequences, each of ``group`` query heads and at most ``most_keys`` keys.

    ``page`` is the number of keys of a page, 0 without pages. ``same``: one tensor is keys and values. ``size``: bytes
    of an element; E4M3 has ``sm100/decode.py`` alone.

    More than ``FEW`` heads take ``sm100/decode.py``, fewer Hopper's ``decode.py``, unless they have 512 columns, for
    which that needs a second launch. Counted in the PTX simulator, the former beside the latter, warp instructions and
    bytes of global memory that were asked for: 64/4 heads, D 128, B 2, 1024 keys 0.60 M for 0.80 M, 4.6 MB for 6.7 MB;
    40/1 heads, D 64, B 2, 1024 keys 0.21 M for 0.43 M, 0.6 MB for 2.1 MB. For 32/8 heads of D 128 it is 0.58 M for 0.58
    M and 4.4 MB for 5.1 MB with B 1 and 1024 keys, but 2.4 M for 1.1 M and 14.4 MB for 13.8 MB with eight lengths from
    1 to 700: tiles have 128 keys there, 16 or 32 here, and products 16 heads at least.
    """
    if dim == dim_v and dim in _DIMS and (group > FEW or size == 1 or dim == 512):
        return _tall(dim, group, sms, most_keys, groups, page, same, size)
    return narrow(dim, dim_v, group, sms, most_keys, groups, page)


def _tall(dim: int, group: int, sms: int, most_keys: int, groups: int, page: int, same: bool, size: int) -> Plan:
    """``blocks`` are clusters, ``combiners`` the CTAs of one that share the keys of a side.

    These are as many as the chip has room for if every group has a cluster, but no more than there are tiles.
    """
    heads = next(n for n in (16, 32, _MOST_HEADS) if n >= min(group, _MOST_HEADS))
    sides = 2 if group > _MOST_HEADS else 1
    chunks = -(-group // (heads * sides))
    part = min(dim, _KEYS)
    room = _SHARED - _SMALL - heads * (dim + _KEYS) * size
    tiles, pieces = -(-most_keys // _KEYS), max(groups * chunks, 1)
    splits = 1
    while splits * sides < _CLUSTER and 2 * splits * sides * pieces <= sms and splits < tiles:
        splits *= 2
    by_group = tiles <= splits
    least = 1 if by_group else max(splits * 3 // 4, 1)
    clusters = min(sms // (splits * sides), pieces if by_group else max(pieces * tiles // least, 1))
    stages = min(room // (_KEYS * part * size), _AT_ONCE * 2 // size)
    sizes = dict(dim=dim, heads=heads, sides=sides, stages=stages, same=same)
    return Plan(
        "trace_wide", paged(page) | sizes, chunks, 1, int(by_group), least, clusters, splits,
        2 * clusters * sides * heads * (dim + 2), clusters * sides * splits,
    )  # fmt: skip
