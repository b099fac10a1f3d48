"""What the kernel by ``mma.sync`` is compiled for, and its shared memory. Plans read this without cutlass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_attnkit.cuda.smem import CHUNK, Region
from torch_attnkit.cuda.workspace import SplitLayout
from torch_attnkit.kernels.cache.problem import Row

LANES = 32
ATOM = 16  # heads of an MMA, and keys of one step of P V
ITEMSIZE = 2  # bytes of an element of Q, of a key and of P
WORD = 4  # bytes of a float, and of a key's validity
IN_FLIGHT = 8  # splits that a thread has in flight while it combines, of a vector
VECTOR = 8  # columns that a thread combines: 16 bytes of results


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory of a CTA. Rows are not padded: their 16-byte chunks are swizzled."""

    query: Region  # (rows, D), until it is in registers
    partials: Region  # over query: (warps, rows, keys), scores over each warp's columns
    tiles: Region  # (stages, keys, D) of 16-bit rows, (1, keys, D) of dequantised ones
    staging: Region  # (stages, keys): encoded rows
    probabilities: Region  # (rows, keys)
    factors: Region  # (rows): that rescale O before a tile's product
    results: Region  # (rows): that make results of O
    valid: Region  # (ahead + 1, keys): whether a key of a tile counts
    flag: Region  # whether this CTA is the last to arrive of those that share a work tile

    @property
    def nbytes(self) -> int:
        return self.flag.end


@dataclass(frozen=True)
class Config:
    """``heads``: of a work tile, 8, 16 or 32; a token's last work tile may have fewer. ``split_kv``: several CTAs share
    a work tile's keys. ``paged``: (window, entries) caches in pages. ``align``: alignment of cache rows in bytes.
    ``divided``: encoded rows have a global scale."""

    dtype: Any
    dim: int
    heads: int
    keys: int  # of a tile
    warps: int
    stages: int
    split_kv: bool
    paged: tuple[bool, bool] = (False, False)
    format: str = "none"
    rope_dim: int = 0
    align: int = CHUNK
    divided: bool = False

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def row(self) -> Row:
        """Row format of the caches."""
        return Row(self.format, self.dim, self.rope_dim)

    @property
    def pitch(self) -> int:
        """Bytes of a row of Q, and of a key in 16 bits."""
        return self.dim * ITEMSIZE

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes of such a row."""
        return self.pitch // CHUNK

    @property
    def rows(self) -> int:
        """Rows of the products: heads, padded to those of an MMA."""
        return self.row_groups * ATOM

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows."""
        return -(-self.heads // ATOM)

    @property
    def columns(self) -> int:
        """Columns of Q, K, V and O that are a warp's."""
        return self.dim // self.warps

    @property
    def row_lanes(self) -> int:
        """Lanes of a warp that share a row in the softmax, where a warp has ``rows / warps`` rows with all keys."""
        return LANES * self.warps // self.rows

    @property
    def lane_keys(self) -> int:
        """Neighbouring keys of a row that a lane has there."""
        return self.keys // self.row_lanes

    @property
    def tile_bytes(self) -> int:
        return self.keys * self.pitch

    @property
    def slot_bytes(self) -> int:
        """Bytes of a staged row."""
        return 0 if self.row.plain else -(-self.row.size // CHUNK) * CHUNK

    @property
    def staging_bytes(self) -> int:
        """Bytes of a staged tile."""
        return self.keys * self.slot_bytes

    @property
    def ahead(self) -> int:
        """Tiles in flight while one is attended: a stage of 16-bit rows is read by then, an encoded one was decoded."""
        return self.stages - 1 if self.row.plain else self.stages

    @property
    def split(self) -> SplitLayout:
        return SplitLayout(self.heads, self.dim)

    @cached_property
    def shared(self) -> SharedMemory:
        query = Region(0, self.rows * self.pitch)
        partials = Region(0, self.warps * self.rows * self.keys * WORD)
        tiles = Region(max(query.end, partials.end), (self.stages if self.row.plain else 1) * self.tile_bytes)
        staging = Region(tiles.end, self.stages * self.staging_bytes)
        probabilities = Region(staging.end, self.rows * self.keys * ITEMSIZE)
        factors = Region(probabilities.end, self.rows * WORD)
        results = Region(factors.end, self.rows * WORD)
        valid = Region(results.end, (self.ahead + 1) * self.keys * WORD)
        flag = Region(valid.end, CHUNK)
        return SharedMemory(query, partials, tiles, staging, probabilities, factors, results, valid, flag)

    @property
    def shared_bytes(self) -> int:
        return self.shared.nbytes
