"""Launch planning of the kernel by ``mma.sync``: tiles by head size, in 99 KB of shared memory and 255 registers a
thread, and a cost model that chooses heads of a work tile and splits of its keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_attnkit.cuda.limits import LIMITS
from torch_attnkit.cuda.smem import RESERVED

from ..problem import Problem
from ..sm90.plan import ALIGNED, LEAST_BYTES, Plan, share
from .config import IN_FLIGHT, LANES, VECTOR, Config

__all__ = ["DTYPES", "LEAST_BYTES", "TILES", "plan"]

DTYPES = "bf16 f16"
_SHARED = LIMITS["sm80"].shared  # of a CTA, of all three targets
_MOST_STAGES = 3
_PER_SM = 2  # CTAs on a multiprocessor at most: their registers


class Tile(NamedTuple):
    """Heads of a work tile, keys of a K/V tile, and warps, which have O by columns, a multiple of 32 each."""

    heads: int
    keys: int
    warps: int


# D, a multiple of 128: tiles of few heads to many. With 8, of the 16 rows of an MMA, a token's keys are copied for more
# CTAs, and splits are combined by more. None is timed on the GPUs that they are for.
TILES: dict[int, tuple[Tile, ...]] = {
    128: (Tile(8, 32, 4), Tile(16, 32, 4), Tile(32, 32, 4)),
    256: (Tile(8, 32, 8), Tile(16, 32, 8), Tile(32, 32, 8)),
    512: (Tile(8, 32, 8), Tile(16, 32, 8), Tile(32, 32, 8)),
}
# Microseconds, modelled, never measured: of a launch, of a work tile beside its keys, of a tile of 32 keys of 512
# columns by its heads; of joining splits, and of each time that the last CTA waits for them.
_START, _WORK_TILE, _TILE = 4.0, 2.0, {8: 1.0, 16: 1.0, 32: 1.5}
_JOIN, _WAIT = 2.0, 0.7


def _sizes(problem: Problem, tile: Tile, stages: int, split_kv: bool) -> dict[str, Any]:
    p = problem
    return dict(
        dim=p.dim, **tile._asdict(), stages=stages, split_kv=split_kv, paged=(p.near_paged, p.far_paged),
        format=p.format, rope_dim=p.rope_dim, align=p.align, divided=p.divided,
    )  # fmt: skip


def _tiles(problem: Problem) -> list[Tile]:
    """Those that are not padded by a whole tile of fewer heads."""
    least, *more = TILES[problem.dim]
    return [least, *(tile for tile in more if 2 * problem.heads > tile.heads)]


def _stages(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Stages, as many as fit, and CTAs on a multiprocessor then. Encoded rows take one at least, others two."""
    least = 2 if problem.format == "none" else 1
    for stages in range(_MOST_STAGES, least - 1, -1):
        nbytes = Config(None, **_sizes(problem, tile, stages, False)).shared_bytes
        if nbytes <= _SHARED:
            return stages, min(_PER_SM, (_SHARED + RESERVED) // (nbytes + RESERVED))
    raise AssertionError(f"no stages of {tile} fit in {_SHARED} bytes")


def cost(problem: Problem, tile: Tile, groups: int, slots: int) -> float:
    """Microseconds, roughly, with ``groups`` CTAs a work tile, of which ``slots`` run at a time."""
    p = problem
    work = p.tokens * -(-p.heads // tile.heads) * groups
    tiles = -(-share(p.keys, groups) // tile.keys)
    join = 0.0
    if groups > 1:
        vectors = min(tile.heads, p.heads) * p.dim // VECTOR
        join = _JOIN + _WAIT * -(-groups // IN_FLIGHT) * -(-vectors // (LANES * tile.warps))
    return _START + -(-work // slots) * (_WORK_TILE + tiles * _TILE[tile.heads] * p.dim / 512) + join


def plan(problem: Problem, sms: int) -> Plan:
    """The plan of a launch on ``sms`` multiprocessors."""
    p, found = problem, []
    for tile in _tiles(p):
        stages, per_sm = _stages(p, tile)
        work, slots = p.tokens * -(-p.heads // tile.heads), sms * per_sm
        most = max(1, min(slots // work, -(-p.keys // ALIGNED)))
        found += [(cost(p, tile, groups, slots), groups, stages, tile) for groups in range(1, most + 1)]
    _, groups, stages, tile = min(found, key=lambda cut: cut[0])
    head_blocks = -(-p.heads // tile.heads)
    work, split_kv = p.tokens * head_blocks, groups > 1
    sizes = _sizes(p, tile, stages, split_kv)
    floats = work * groups * Config(None, **sizes).split.floats if split_kv else 0
    return Plan(sizes, head_blocks, 1, groups, work, floats, work if split_kv else 0)
