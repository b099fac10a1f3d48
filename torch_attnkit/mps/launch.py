"""A kernel with its grid: checked once when a plan is built, because a wrong geometry can freeze a machine.

A grid is a number of threadgroups by a number of threads in each. ``compile_shader`` takes the total number of threads
instead, which is what Metal calls dispatchThreads; the product is formed here and nowhere else.

Arguments are tensors, lists of int (int64 in the kernel: a ``constant`` struct of ``long``) and floats (``constant
float&``). A plain int is bound as int64 too, so it would fit no ``int&``; kernels take their sizes as one struct. Metal
checks neither kinds nor sizes, and a slot that is not bound keeps what the last kernel left there, so the number
of arguments is checked at every launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .library import Library

Arguments = tuple[Any, ...]
Launch = Callable[[Arguments], None]

SIMD = 32  # threads of a simdgroup on every Apple GPU
VECTOR = 4  # elements of the vectors that kernels read: Metal has no longer ones
_MOST_THREADS = 2**32 - 1  # positions in the grid are 32-bit


def most_simdgroups(library: Library, kernel: str) -> int:
    """How many simdgroups this pipeline can run in a threadgroup; registers decide, so it differs between kernels."""
    limit = int(getattr(library.compiled, kernel).max_threads_per_threadgroup)
    if limit < SIMD:
        raise RuntimeError(f"{kernel}: the pipeline runs {limit} threads in a threadgroup, a simdgroup needs {SIMD}")
    return limit // SIMD


def launcher(library: Library, kernel: str, groups: tuple[int, int, int], threads: int) -> Launch:
    """What launches ``kernel`` on ``groups`` threadgroups of ``threads`` threads each, given its arguments in order.

    ValueError for a grid that the kernel cannot have; with an empty grid there is nothing to launch, and the launcher
    does nothing.
    """
    run, slots = getattr(library.compiled, kernel), library.slots[kernel]
    limit = run.max_threads_per_threadgroup
    if threads < SIMD or threads % SIMD or threads > limit:
        raise ValueError(
            f"{kernel}: {threads} threads in a threadgroup, accepted: multiples of {SIMD} up to the pipeline's {limit}"
        )
    if min(groups) < 0:
        raise ValueError(f"{kernel}: {groups} threadgroups, accepted: sizes of at least 0")
    total = (groups[0] * threads, groups[1], groups[2])
    if max(total) > _MOST_THREADS:
        raise ValueError(f"{kernel}: {total} threads, accepted: at most {_MOST_THREADS} along an axis")
    if math.prod(groups) == 0:
        return lambda args: None

    def launch(args: Arguments) -> None:
        if len(args) != slots:
            raise ValueError(f"{kernel}: {len(args)} arguments, accepted: {slots}, one for every buffer it declares")
        run(*args, threads=total, group_size=(threads, 1, 1))

    return launch


def by_alignment(variant: Callable[[int], Launch], steps: Iterable[int]) -> Callable[[Sequence[Any], Arguments], None]:
    """What launches ``variant(4)``, which reads vectors of four elements, where these are aligned, else ``variant(1)``.

    ``steps`` are the sizes and strides that must be multiples of 4. They belong to the plan; the storage offsets of the
    ``tensors`` given at the launch do not. Metal binds a tensor at its offset, so they decide as well.
    """
    build = functools.cache(variant)
    even = all(s % VECTOR == 0 for s in steps)
    build(VECTOR if even else 1)

    def launch(tensors: Sequence[Any], args: Arguments) -> None:
        aligned = even and not any(t.storage_offset() % VECTOR for t in tensors)
        build(VECTOR if aligned else 1)(args)

    return launch


def bound(tensor: Any, other: Any) -> Any:
    """``tensor``, or ``other`` in the slot of one that is absent or has no memory: every declared slot is bound."""
    return other if tensor is None or tensor.numel() == 0 else tensor
