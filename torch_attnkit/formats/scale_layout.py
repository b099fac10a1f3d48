"""Block scales in the order that block-scaled tensor-core instructions read: "128x4".

Scales (M, Kb), one byte per block of a row, are padded with zeros to (128, 4) tiles of 512 bytes,
tiles of the same rows adjacent. Byte (m, k) lies at

    ((m // 128) * ceil(Kb / 4) + k // 4) * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4

(cuBLAS documentation, "1D block scaling factors layout"; PTX ISA, tcgen05 block scaling).
"""

from __future__ import annotations

from torch import Tensor

from .blocks import check_bytes

TILE_M, TILE_K = 128, 4


def padded_shape(m: int, kb: int) -> tuple[int, int]:
    """(M, Kb) rounded up to whole (128, 4) tiles. Works on symbolic sizes."""
    return -(-m // TILE_M) * TILE_M, -(-kb // TILE_K) * TILE_K


def to_128x4(scale: Tensor) -> Tensor:
    """Linear scales, uint8 (..., M, Kb), to swizzled bytes, uint8 (..., ceil128(M), ceil4(Kb)).

    Each matrix of the batch is swizzled by itself. The bytes of a matrix are in the order above;
    its two axes only carry their number. Padding bytes are 0.

    Raises TypeError unless uint8, ValueError for fewer than two axes.
    """
    check_bytes("scale_layout.to_128x4", "scale", scale)
    if scale.dim() < 2:
        raise ValueError(f"scale_layout.to_128x4: scale has shape {tuple(scale.shape)}; accepted: (..., M, Kb)")
    *batch, m, kb = scale.shape
    rows, cols = padded_shape(m, kb)
    padded = scale.new_zeros(*batch, rows, cols)  # not pad(), which refuses empty inputs before torch 2.9
    padded[..., :m, :kb] = scale
    # m splits into (tile, m % 128 // 32, m % 32), k into (tile, k % 4).
    tiles = padded.reshape(*batch, rows // TILE_M, 4, 32, cols // TILE_K, TILE_K)
    tiles = tiles.movedim(-2, -4).transpose(-3, -2)  # (..., tile_m, tile_k, m % 32, m // 32, k % 4)
    return tiles.reshape(*batch, rows, cols)


def from_128x4(swizzled: Tensor, m: int, kb: int) -> Tensor:
    """Swizzled bytes, uint8 (..., ceil128(M), ceil4(Kb)), to linear scales, uint8 (..., M, Kb).

    Raises TypeError unless uint8, ValueError unless the last two axes are padded_shape(m, kb).
    """
    check_bytes("scale_layout.from_128x4", "swizzled", swizzled)
    rows, cols = padded_shape(m, kb)
    if swizzled.dim() < 2 or tuple(swizzled.shape[-2:]) != (rows, cols):
        raise ValueError(
            f"scale_layout.from_128x4: swizzled has shape {tuple(swizzled.shape)}; accepted: "
            f"(..., {rows}, {cols}) for M {m}, Kb {kb}"
        )
    batch = swizzled.shape[:-2]
    tiles = swizzled.reshape(*batch, rows // TILE_M, cols // TILE_K, 32, 4, TILE_K)
    tiles = tiles.transpose(-3, -2).movedim(-4, -2)  # (..., tile_m, m // 32, m % 32, tile_k, k % 4)
    return tiles.reshape(*batch, rows, cols)[..., :m, :kb].clone()
