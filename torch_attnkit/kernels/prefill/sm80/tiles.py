"""Tiles of the prefill kernel by ``mma.sync``, by head size: in 99 KB of shared memory and 255 registers a thread."""

from __future__ import annotations

from typing import Any, NamedTuple

DTYPES = "bf16 f16"
ATOM, WARP = 16, 32  # rows of a product; threads
MOST_IN_REGISTERS = 128  # columns of Q that a warp keeps in registers; of more it reads each again for every block
FEW = 64  # rows of a sequence's KV head, up to which a tile has no more


class MmaTile(NamedTuple):
    """Rows of Q, keys of a block, stages of K and V, and products of 16 rows that a warp has one behind the other."""

    tile_m: int
    tile_n: int
    stages: int
    atoms: int = 1

    def sizes(self) -> dict[str, Any]:
        return {"tile_m": self.tile_m, "tile_n": self.tile_n, "stages": self.stages, "atoms": self.atoms}


class MmaTiles(NamedTuple):
    many: MmaTile
    few: MmaTile


# (D, Dv): D a multiple of 16, Dv of 32, which the epilogue stores.
MMA_TILES: dict[tuple[int, int], MmaTiles] = {
    (32, 32): MmaTiles(MmaTile(128, 64, 3, 2), MmaTile(64, 64, 4)),
    (64, 64): MmaTiles(MmaTile(128, 64, 3, 2), MmaTile(64, 64, 4)),
    (96, 96): MmaTiles(MmaTile(128, 48, 2, 2), MmaTile(64, 48, 3)),
    (128, 128): MmaTiles(MmaTile(128, 32, 3, 2), MmaTile(64, 32, 4)),
    (192, 128): MmaTiles(MmaTile(128, 32, 2), MmaTile(64, 32, 3)),
    (256, 256): MmaTiles(MmaTile(64, 32, 2), MmaTile(64, 32, 2)),
}


def mma_tile(dim: int, dim_v: int, rows: int) -> MmaTile:
    """For ``rows`` rows of a sequence's KV head at most."""
    tiles = MMA_TILES[dim, dim_v]
    return tiles.few if rows <= FEW else tiles.many
