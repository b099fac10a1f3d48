"""Forms of ops that write into given tensors: ``sdpa_decode_paged_out(..., *, out, lse)`` beside ``sdpa_decode_paged``.

Derived from the table, so that a form has the rows, plans and kernels of its op. ``torch.compile`` makes a functional
call of a form as it does of every op that writes in place, and gives the tensor itself where nobody else reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from .memory import span
from .op import Call, Op, differ
from .spec import short

SUFFIX = "_out"
ALIGNMENT = 16  # bytes: what kernels take for granted of outputs, which torch allocates at more


def form_of(op: Op) -> Op | None:
    """The form of ``op`` that writes into given tensors; None where it returns nothing, writes in place already, or has
    outputs that some calls leave empty."""
    if not op.outnames or op.mutated or op.unless:
        return None
    inside = op.schema[len(op.name) + 1 : op.schema.rindex(") ->")]
    star = "" if op.positional < len(op.argnames) else ", *"
    outs = ", ".join(f"Tensor({chr(ord('a') + i)}!) {name}" for i, name in enumerate(op.outnames))
    return dataclasses.replace(op, schema=f"{op.name}{SUFFIX}({inside}{star}, {outs}) -> ()", base=op, backward="")


def check(op: Op, call: Call, outs: Iterable[torch.Tensor], *, traced: bool = False) -> None:
    """The given tensors ``outs`` must be what ``op.base`` would return for ``call``; ``traced`` as in ``Op.bind``."""
    assert op.base is not None
    for name, out, (shape, dtype) in zip(op.mutated, outs, op.base.outputs(call), strict=True):
        if out.dim() != len(shape) or any(map(differ, out.shape, shape)):
            raise ValueError(f"{op.name}: {name} has shape {tuple(out.shape)}, accepted: {tuple(shape)}")
        if out.dtype != dtype:
            raise TypeError(f"{op.name}: {name} is {short(out.dtype)}, accepted: {short(dtype)}")
        if out.device != call.device:
            raise ValueError(f"{op.name}: {name} is on {out.device}, but the call is on {call.device}")
        if not traced and not out.is_contiguous():
            raise ValueError(f"{op.name}: {name} has strides {out.stride()}, accepted: a contiguous tensor")


def check_memory(op: Op, args: tuple[Any, ...], outs: Iterable[torch.Tensor]) -> None:
    """Nothing that is written may share memory with anything else that is given, and kernels store whole vectors."""
    spans = [(name, span(t)) for name, t in zip(op.argnames, args, strict=False) if isinstance(t, torch.Tensor)]
    for name, out in zip(op.mutated, outs, strict=True):
        begin, end = span(out)
        if begin % ALIGNMENT and end > begin:
            raise ValueError(f"{op.name}: {name} starts at {begin % ALIGNMENT} past a multiple of {ALIGNMENT} bytes, "
                             f"accepted: a multiple")  # fmt: skip
        for other, (first, last) in spans:
            if begin < last and first < end:
                raise ValueError(f"{op.name}: {name} shares memory with {other}, accepted: memory of its own")
        spans.append((name, (begin, end)))
