"""How the heads, columns and keys of a token are cut into threadgroups on Apple GPUs.

A threadgroup reads its keys once for all of its heads, so the fewest bytes are loaded where it has all heads and all
keys. Few tokens are then fewer threadgroups than there are cores: so heads, and after them keys, are spread over more
threadgroups where the busiest core would otherwise work much longer. Of more tokens than cores it is only the last
ones, those that would not fill the cores once more, whose keys are split. Times are modelled, and only compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torch_attnkit.formats import kv_cache

from .problem import Problem

# Columns of a simdgroup. With 256 a simdgroup has twice the registers of Q' and O', and half as many have to agree on
# scores: 64 heads of 512 columns are 16 simdgroups, of 104 registers a lane on the cores that have 208 KB of them.
_SLICE, _WIDE = 128, 256
_WIDE_FROM = 32 * 512  # heads times columns of a threadgroup: beyond, simdgroups are wide
# Heads times columns: what of Q' and O' stays in registers is 192 KB for 16 bits, and for float32 128 KB.
_MOST_COLUMNS = {2: 64 * 512, 4: 32 * 512}
_MOST_HEADS = 128
_LEAST_HEADS = 16  # below, threadgroups load the same keys for hardly any work
_MOST_BYTES = 32768  # of threadgroup memory, on every Apple GPU
_MOST_KEYS, _MOST_WIDE_KEYS = 32, 16  # of a tile; scores of 32 keys are registers that wide simdgroups do not have
_LEAST_KEYS = 128  # of a split, so that its partial result is a smaller part of what it reads
_MOST_SPLITS = 64
# Of a core in a cycle (Philip Turner, metal-benchmarks): operations in float, and bytes from the GPU's cache.
_FLOPS, _BYTES = 256, 32
_SLACK = 1.3  # of the shortest modelled time, for fewer bytes: 128 tokens are 4 waves on 40 cores instead of 3.2


@dataclass(frozen=True, order=True)
class Cut:
    """A token's work in threadgroups: ``groups`` of ``heads`` heads, by ``splits`` of the keys but for the first
    ``whole`` tokens."""

    groups: int
    heads: int  # a multiple of 8
    slice: int  # columns of a simdgroup
    keys: int  # of a tile
    splits: int
    whole: int

    def simdgroups(self, dim: int) -> int:
        return simdgroups(dim, self.heads, self.slice)


def slice_of(dim: int, heads: int, itemsize: int) -> int:
    """Columns of a simdgroup of a threadgroup with so many heads."""
    return _WIDE if itemsize == 2 and dim >= _WIDE and heads * dim > _WIDE_FROM else _SLICE


def simdgroups(dim: int, heads: int, columns: int) -> int:
    """Of a threadgroup with so many heads, a multiple of 8."""
    return heads // 8 * (dim // columns)


def threadgroup_bytes(dim: int, itemsize: int, heads: int, columns: int, keys: int) -> int:
    """Threadgroup memory of ``sparse_rows``: a tile's rows, its places and the next one's, sums of columns."""
    sums = simdgroups(dim, heads, columns) * keys // 8 * 32 if dim > columns else 0
    return keys * (dim * itemsize + 32) + 2 * keys * 8 + sums * 8


def keys_of(dim: int, itemsize: int, heads: int) -> int:
    """Keys of a tile: a multiple of 8 for which there is room."""
    columns = slice_of(dim, heads, itemsize)
    fits = lambda keys: threadgroup_bytes(dim, itemsize, heads, columns, keys) <= _MOST_BYTES
    most = _MOST_WIDE_KEYS if columns == _WIDE else _MOST_KEYS
    return next(keys for keys in range(most, 0, -8) if fits(keys))


def most_heads(dim: int, itemsize: int) -> int:
    """Heads that a threadgroup has at most."""
    return min(_MOST_HEADS, _MOST_COLUMNS[itemsize] // dim)


def heads_of(dim: int, itemsize: int, heads: int, most: int) -> Iterator[tuple[int, int]]:
    """(groups, heads of one), from the most heads that a threadgroup may have on: evenly, in tiles of 8."""
    tiles, last = -(-heads // 8), 0
    for groups in range(1, tiles + 1):
        each = -(-tiles // groups) * 8
        fits = each <= min(most, most_heads(dim, itemsize)) and -(-tiles * 8 // each) == groups and each != last
        if fits and (each >= _LEAST_HEADS or not last):
            last = each
            yield groups, each


def cuts(problem: Problem, cores: int, most: int) -> Iterator[Cut]:
    """Every way to cut ``problem`` into threadgroups of at most ``most`` heads."""
    p, itemsize = problem, problem.dtype.itemsize
    for groups, heads in heads_of(p.dim, itemsize, p.heads, most):
        columns, keys = slice_of(p.dim, heads, itemsize), keys_of(p.dim, itemsize, heads)
        yield Cut(groups, heads, columns, keys, 1, p.tokens)
        full = p.tokens * groups // cores * cores // groups  # tokens that fill the cores a whole number of times
        for splits in range(2, min(p.keys // _LEAST_KEYS, _MOST_SPLITS) + 1):
            for whole in sorted({0, full} - {p.tokens}):
                yield Cut(groups, heads, columns, keys, splits, whole)


def token_loads(problem: Problem, cut: Cut, splits: int) -> int:
    """Bytes that the threadgroups of a token with so many splits load and store, and those of merging them."""
    p, itemsize = problem, problem.dtype.itemsize
    row = kv_cache.row_bytes(p.format, p.dim, p.rope_dim) * (itemsize if p.format == "none" else 1)
    nbytes = p.heads * p.dim * itemsize  # of a token's q, its result, and what a split leaves
    parts = 0 if splits == 1 else 2 * splits * (nbytes + p.heads * 2 * torch.float32.itemsize)
    return cut.groups * p.keys * row + (splits + 1) * nbytes + parts


def loads(problem: Problem, cut: Cut) -> int:
    """The same of all tokens."""
    rest = problem.tokens - cut.whole
    return cut.whole * token_loads(problem, cut, 1) + rest * token_loads(problem, cut, cut.splits)


def cycles(problem: Problem, cut: Cut, cores: int) -> float:
    """Cycles of the core that has the most to do: two products of two operations a term, then what they load. Tokens
    whose keys are split follow the others."""
    p, total = problem, 0.0
    for tokens, splits in ((cut.whole, 1), (p.tokens - cut.whole, cut.splits)):
        each = cut.groups * splits
        waves = -(-tokens * each // cores)  # of threadgroups, on that core
        share = -(-p.keys // (splits * cut.keys)) * cut.keys
        total += waves * (4 * cut.heads * share * p.dim / _FLOPS + token_loads(p, cut, splits) / each / _BYTES)
    return total


def plan(problem: Problem, cores: int, most: int = _MOST_HEADS) -> Cut:
    """The cut that loads the fewest bytes, of those whose modelled time is at most ``_SLACK`` of the shortest."""
    found = [(cycles(problem, cut, cores), loads(problem, cut), cut) for cut in cuts(problem, cores, most)]
    limit = _SLACK * min(found)[0]
    return min((bytes, time, cut) for time, bytes, cut in found if time <= limit)[2]
