"""Calls of Metal's kernels on CPU tensors, and their inputs, for the tests of the families."""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core import dispatch
from torch_attnkit.core.target import Target
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity import poison, reference_of

METAL = Target("metal", simulated=True)


def run(name: str, args: tuple[Any, ...], **kwargs: Any) -> list[torch.Tensor]:
    """The op's Metal kernel on CPU tensors, with poisoned outputs."""
    op = dispatch.OPS[name]
    values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
    call = op.bind(values)
    outs = [poison(shape, dtype, "cpu") for shape, dtype in op.outputs(call)]
    dispatch.build(op, call, METAL)(*values, *outs)
    return outs


def compare(name: str, args: tuple[Any, ...], **kwargs: Any) -> None:
    """The kernel's results are the reference's, by its tolerance."""
    op = dispatch.OPS[name]
    refs = (reference_of(op, args, kwargs, double=d) for d in (False, True))
    for out, got, ref, ref64 in zip(op.outnames, run(name, args, **kwargs), *refs, strict=True):
        check(f"{name} {out}", got, ref, ref64)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)  # (B + 1,)


def shifted(t: torch.Tensor, offset: int) -> torch.Tensor:
    """``t`` that begins ``offset`` elements into its memory."""
    return torch.zeros(t.numel() + offset, dtype=t.dtype)[offset:].view(t.shape).copy_(t)
