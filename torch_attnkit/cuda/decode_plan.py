"""How a decode launch is cut: tiles, warps, stages and blocks for one signature. Knows sizes, not ops."""

from __future__ import annotations

from dataclasses import dataclass

_SHARED = 227 * 1024  # bytes of shared memory that the blocks of a Hopper SM have together
_RESERVED = 1024  # of which the driver takes this much a block
_LOG2E = 1.4426950408889634
_SHORT = 512  # keys of a group that one block attends alone
_LONG = 200 << 10  # bytes of keys and values for every SM, from which on one block on it with longer tiles is faster
_PER_SM = 2  # blocks on an SM: while one ends a group, the other keeps memory busy
_ROUNDS = 12  # waits for memory from which on a second kernel merges faster than the block that brings the last part
# The wide kernel is faster for few heads, too: D, and from how many bytes of keys and values for every SM on; over
# pages, from how many on and up to how many; and without them, with 512 columns, from how many keys on.
_MUCH = {64: 3 << 19, 128: 3 << 19, 256: 3 << 17}
_MUCH_PAGED = {128: (3 << 20, 6 << 20)}
_MANY = 4096
FEW = 8  # query heads that ``cuda/decode.py`` has at once
_WIDE = {64: (64, 2), 128: (64, 2), 256: (32, 2), 512: (32, 1)}  # D: keys of a tile and blocks on an SM
_LATENT = (48, 3)  # keys of a tile and tiles in memory, for 512 columns where keys are values
_LEAST = 128  # keys that a block attends at least, for its part has 64 rows to write and to merge


@dataclass(frozen=True)
class Plan:
    """A kernel, by the name of its trace and what it is compiled with; and how it runs.

    ``sizes`` are entries of ``Config`` or ``WideConfig`` (``cuda/decode_types.py``) or ``TallConfig``
    (``cuda/sm100/decode_types.py``), the other numbers are arguments of a launch; ``floats`` and ``counters`` are its
    workspace. ``combiners`` merge parts: blocks of a second kernel, or CTAs of a cluster.
    """

    trace: str
    sizes: dict[str, int]
    chunks: int
    beside: int
    by_group: int
    least: int
    blocks: int
    combiners: int
    floats: int
    counters: int


def plan(
    dim: int, dim_v: int, group: int, sms: int, most_keys: int, groups: int, page: int = 0, *, same: bool = False
) -> Plan:
    """For ``groups`` KV heads of all sequences, each of ``group`` query heads and at most ``most_keys`` keys.

    ``page`` is the number of keys of a page, 0 without pages. ``same``: one tensor is keys and values, which the wide
    kernel has to know; with 512 columns that is a kernel of its own. Blackwell has a plan of its own.

    The wide kernel for the other one with few heads, H200, 32/8 heads, no pages, us: D 128, 1x8192 17.8 for 15.6,
    16x8192 127 for 131, 1x131072 128 for 134, 64x4096 243 for 258, 128x8192 965 for 999; D 64, 16x8192 69.3 for 70.1,
    128x8192 485 for 507; 16/8 heads, D 256, 1x8192 28.1 for 29.0, 16x8192 248 for 258, 128x8192 1905 for 2075. Over
    pages of 16 and of 64, n x 8192: D 128, n = 8 73.8, 72.1 for 73.4, 71.6, 16 137.0, 133.7 for 138.6, 135.6, 32 265,
    256 for 263, 258, 64 548, 532 for 519, 512; D 256, n = 16 281 for 262, in turns with FlashAttention-3, though alone
    260 for 265; D 64 never. D 512, a KV head with 8 query heads, no pages, K = V with the latent kernel
    that had one score warpgroup in brackets: 1x1024 17.4 (15.5) for
    14.0 (13.9), 1x8192 18.7 (17.7) for 22.2 (21.5), 16x8192 71.6 (48.3) for 78.4 (62.1), 128x4096 242 (144) for 275
    (210); over pages of 16 only 1x8192 gains. Over pages it makes no difference whether neighbouring blocks attend the
    KV heads of a sequence side by side, whose keys lie side by side there.
    """
    nbytes = groups * most_keys * (dim + dim_v) * 2
    low, high = _MUCH_PAGED.get(dim, (1, 0)) if page else (_MUCH.get(dim, 1 << 60), 1 << 60)
    streams = most_keys > _SHORT and sms * low <= nbytes <= sms * high
    streams |= dim == 512 and page == 0 and most_keys >= _MANY
    if dim == dim_v and dim in _WIDE and (group > FEW or streams):
        return _wide(dim, group, sms, most_keys, groups, page, same)
    return narrow(dim, dim_v, group, sms, most_keys, groups, page)


def narrow(dim: int, dim_v: int, group: int, sms: int, most_keys: int, groups: int, page: int) -> Plan:
    """One block an SM with tiles of 32 keys instead of two with 16, H200, 32/8 heads, D 128: 1x8192 15.9 for 17.5 us,
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
    elif not page and dim == dim_v == 128 and groups * most_keys * (dim + dim_v) * 2 >= sms * _LONG:
        keys, per_sm = 32, 1
        stages = (_SHARED - _RESERVED - 16) // (2 * warps * stage)
    blocks, chunks, least = sms * per_sm, -(-group // heads), 1 if by_group else 2 * warps
    pieces = groups * chunks
    parts = 1 if by_group else _parts(blocks, pieces, -(-most_keys // keys), least)
    combine = _rounds(min(group, heads), dim_v, 32 * warps, parts) > _ROUNDS
    sizes = dict(dim=dim, dim_v=dim_v, heads=heads, keys=keys, warps=warps, stages=stages, combine=combine)
    return Plan(
        "trace", paged(page) | sizes, chunks, 1, int(by_group), least, blocks,
        min(pieces * min(group, heads), sms) if combine else 0, 2 * blocks * heads * (dim_v + 2), blocks,
    )  # fmt: skip


def _wide(dim: int, group: int, sms: int, most_keys: int, groups: int, page: int, same: bool) -> Plan:
    """Up to 64 heads a block, whose parts are that much longer."""
    latent = same and dim == 512
    keys, per_sm = (_LATENT[0], 1) if latent else _WIDE[dim]
    heads, by_group = 64, most_keys <= _SHORT
    fixed = heads * dim * 2 + (2 * heads * keys * 4 if dim > 256 else 0)
    stages = _LATENT[1] if latent else min((_SHARED // per_sm - _RESERVED - 16 - fixed) // (keys * dim * 2), 8)
    blocks, chunks, least = sms * per_sm, -(-group // heads), 1 if by_group else -(-_LEAST // keys)
    pieces, beside = groups * chunks, _beside(blocks, chunks)
    parts = 1 if by_group else _parts(blocks // beside, pieces // beside, -(-most_keys // keys), least)
    combine = _rounds(min(group, heads), dim, 256 if dim > 256 else 128, parts) > _ROUNDS
    sizes = dict(dim=dim, keys=keys, stages=stages, combine=combine, same=same)
    return Plan(
        "trace_latent" if latent else "trace_wide", paged(page) | sizes, chunks, beside, int(by_group), least, blocks,
        min(pieces * min(group, heads), sms) if combine else 0, 2 * blocks * heads * (dim + 2), blocks,
    )  # fmt: skip


def paged(page: int) -> dict[str, int]:
    return dict(page=page) if page else {}


def _beside(blocks: int, chunks: int) -> int:
    """How many of a KV head's chunks of query heads go along its keys at the same time: all, or, not to idle more than
    a 16th of the blocks, one."""
    return chunks if blocks // chunks * chunks * 16 >= blocks * 15 else 1


def _parts(blocks: int, pieces: int, tiles: int, least: int) -> int:
    """Into how many parts a group is cut if all groups are equally long, and one more where cuts may fall anywhere."""
    return min(blocks, max(pieces * tiles // least, 1)) // max(pieces, 1) + 1


def _rounds(rows: int, dim_v: int, threads: int, parts: int) -> int:
    """How often a block that merges ``parts`` parts waits for memory: a thread has 4 columns of 8 of them at once."""
    return 0 if parts < 2 else -(-rows * dim_v // (4 * threads)) * -(-parts // 8)


def score_factors(dim: int, scale: float | None, softcap: float) -> tuple[float, float]:
    """What a product of q and k is multiplied by, and what its capped value is, to be a power of two; 0: no cap."""
    scale = dim**-0.5 if scale is None else scale
    return (scale / softcap, softcap * _LOG2E) if softcap > 0 else (scale * _LOG2E, 0.0)


def bounded(count: int) -> int:
    """A window or number of sink tokens, cut to what no cache exceeds, so that sums with positions stay in 32 bits."""
    return min(count, 1 << 30)
