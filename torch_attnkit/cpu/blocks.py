"""Attention by ``csrc/cpu/blocks.cpp``: one pass over keys wherever they lie, in float32, for processors with AVX-512.

PyTorch's kernel sums approximate exponentials where numbers have 16 bits, so that its LSE is wrong in the fifth digit,
and knows neither pages nor windows but as copies and masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_attnkit import cpu
from torch_attnkit.core import invariance
from torch_attnkit.core.op import Call

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/cpu counts them
_ALL = 1 << 31  # more keys than there are


class Axes(NamedTuple):
    """Which axes of a tensor count tokens and heads; -1: none."""

    token: int
    head: int

    def steps(self, t: torch.Tensor) -> tuple[int, int]:
        return (0 if self.token < 0 else t.stride(self.token)), t.stride(self.head)


class Sequence(NamedTuple):
    """Addresses, and T queries of which the last stands at key S - 1; they see keys of [start, end)."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    table: int
    T: int
    S: int
    start: int
    end: int


class Blocks:
    """The kernel for the calls of a signature."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __call__(self, sequences: list[Sequence], sink: torch.Tensor | None) -> bool:
        """Whether it took the call; if not, outputs hold anything."""
        # How rows are shared among threads follows from how many there are.
        calls = [[one] for one in sequences] if invariance.is_on() else [sequences]
        return all([self.kernel(some, cpu.address(sink), torch.get_num_threads()) for some in calls])


def blocks(
    call: Call, tensors: tuple[torch.Tensor, ...], q: Axes, kv: Axes, *, causal: bool = True, among: bool = True,
    paged: bool = False,
) -> Blocks | None:  # fmt: skip
    """The kernel for calls like this one, of q, k and v; None where it is not built or does not take them.

    ``among``: queries before the first key see nothing, causal or not. Pages are the first axis of ``paged`` caches.
    """
    if cpu.kernels is None or not cpu.kernels.blocks_run_here or call.arg.softcap > 0:
        return None
    d, a, dtypes = call.dim, call.arg, {t.dtype for t in tensors}
    if len(dtypes) > 1 or call.dtype not in _DTYPE_CODES or min(d["Hq"], d["D"], d["Dv"]) == 0:
        return None
    _, k, v = tensors
    kernel = cpu.kernels.Blocks(
        [d["Hq"], d["Hkv"], d["D"], d["Dv"]], number=_DTYPE_CODES[call.dtype],
        scale=d["D"] ** -0.5 if a.scale is None else a.scale, causal=causal, among=among, window=min(a.window, _ALL),
        sink_tokens=min(a.sink_tokens, _ALL), q=q.steps(tensors[0]), k=kv.steps(k), v=kv.steps(v),
        pages=[d["Ps"], d["Np"], k.stride(0), v.stride(0)] if paged else [0, 0, 0, 0],
    )  # fmt: skip
    return Blocks(kernel)


def addresses(t: torch.Tensor | None, count: int) -> list[int]:
    """Where each of the ``count`` parts along the first axis begins; 0 for None."""
    if t is None:
        return [0] * count
    begin, step = t.data_ptr(), t.stride(0) * t.itemsize
    return [begin + b * step for b in range(count)]
