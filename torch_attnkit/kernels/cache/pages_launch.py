"""Host side of ``pages_kernel.py`` for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_attnkit.core.spec import short
from torch_attnkit.core.target import Target
from torch_attnkit.cuda import compile

from . import pages
from .pages import Operands, Problem


def writer(problem: Problem, target: Target) -> Callable[[Operands], None]:
    """What writes the tokens of ``problem`` to their slots on ``target``."""
    p = problem
    if p.empty:
        return lambda operands: None

    def compiled(width: int) -> Callable[..., None]:
        vectors = -(-p.heads * max(side.dim for side in p.sides) // width)
        return compile.launcher(
            target,
            p.device,
            trace_pages,
            heads=p.heads,
            dims=tuple(side.dim for side in p.sides),
            dtypes=tuple(short(d) for d in (p.dtype, p.cache_dtype, p.slot_dtype)),
            scaled=tuple(side.scaled for side in p.sides),
            width=width,
            threads=min(pages.MOST_THREADS, -(-vectors // 32) * 32),
        )

    width = pages.width(p)
    wide, narrow = compiled(width), list[Callable[..., None]]()
    odd, cache_odd = width * p.dtype.itemsize - 1, width * p.cache_dtype.itemsize - 1  # the bits of no vector's address

    def launch(operands: Operands) -> None:
        o, run = pages.apart(operands), wide
        if (o.key.data_ptr() | o.value.data_ptr()) & odd or (o.k_cache.data_ptr() | o.v_cache.data_ptr()) & cache_odd:
            if not narrow:
                narrow.append(compiled(1))
            run = narrow[0]
        run(*o)

    return launch


def trace_pages(arch: str, **signature: Any) -> compile.Traced:
    """``pages_kernel.py``."""
    from . import pages_kernel

    return pages_kernel.trace(arch, **signature)
