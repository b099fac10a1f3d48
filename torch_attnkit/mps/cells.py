"""Kernels whose lanes have cells of eight neighbouring numbers: where these can be moved in vectors of 16 bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .launch import SIMD, Launch, launcher
from .library import Library

CELL = 8  # numbers of a lane, CELL of the kernels
WORD = 4  # bytes that codes are moved by
_THREADS = 128  # of a threadgroup: chosen, not measured


def even(tensor: torch.Tensor, steps: Iterable[int], unit: int) -> bool:
    """Whether everything that begins at ``steps`` (elements) inside of ``tensor`` lies at multiples of ``unit``.

    The storage offset decides, too, and belongs to the tensor of one launch: Metal binds a tensor at its offset.
    """
    return tensor.storage_offset() % unit == 0 and all(step % unit == 0 for step in steps)


def launch_of_threads(library: Library, kernel: str, threads: int) -> Launch:
    """What launches ``kernel`` on at least so many threads along one axis."""
    group = min(_THREADS, getattr(library.compiled, kernel).max_threads_per_threadgroup // SIMD * SIMD)
    return launcher(library, kernel, (-(-threads // group), 1, 1), group)
