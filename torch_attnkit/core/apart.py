"""A call on the CPU as calls of its sequences, or tokens, one at a time, where the batch must not decide on bits.

PyTorch's products add up in another order for another number of rows, and the CPU's kernels take few rows another way
than many. One at a time neither sees what else is in the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from . import invariance
from .op import Call, Op
from .target import Target

Index = tuple[slice | int, ...]


def counts(op: Op, call: Call, target: Target) -> bool:
    """Whether ``call`` is to be taken apart."""
    if target.arch != "cpu" or not op.apart or not invariance.is_on():
        return False
    sizes = call.batch if op.apart == "..." else (call.dim[op.apart],)
    return max(sizes, default=1) > 1 and min(sizes, default=1) > 0


def one_at_a_time(op: Op, call: Call, plan: Callable[[tuple[Any, ...]], Callable[..., Any]]) -> Callable[..., Any]:
    """What runs calls like ``call``; ``plan`` gives for arguments of one part what runs it, and is asked once."""
    positions = [
        None if not isinstance(value, torch.Tensor) else _position(op, name, call, value.dim())
        for name, value in vars(call.arg).items()
    ]
    results = [
        _position(op, name, call, len(shape)) for name, (shape, _) in zip(op.outnames, op.outputs(call), strict=True)
    ]
    sizes = call.batch if op.apart == "..." else (call.dim[op.apart],)
    whole = op.apart == "..."
    kept: list[Callable[..., Any]] = []

    def index(position: int | None, at: tuple[int, ...]) -> Index:
        if position is None:
            return ()
        return at if whole else (slice(None),) * position + (slice(at[0], at[0] + 1),)

    def run(*args: Any) -> Any:
        outs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in op.outputs(call)]
        for at in itertools.product(*map(range, sizes)):
            part = tuple(a if p is None or a is None else a[index(p, at)] for a, p in zip(args, positions, strict=True))
            if not kept:
                kept.append(plan(part))
            found = kept[0](*part)
            for out, result, position in zip(outs, found if len(outs) > 1 else (found,), results, strict=True):
                out[index(position, at)] = result
        return tuple(outs) if len(outs) > 1 else outs[0]

    return run


def _position(op: Op, name: str, call: Call, dims: int) -> int | None:
    """Where a tensor has the axis; None where it has not, or is one number for all."""
    spec = op.spec(name, call)
    if op.apart == "...":
        return 0 if spec.batch else None
    names = [str(axis) for axis in spec.axes]
    return names.index(op.apart) if op.apart in names and dims == len(names) else None
