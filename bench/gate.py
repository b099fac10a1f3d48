"""What a bench checks before it times: all of the output against the reference, part by part where it is large.

The reference runs where the tensors are, in float64 and in their own dtype. A large case is cut along what is computed
independently, sequences or rows, KV heads and query heads, so that no part needs much more than ``PART`` bytes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_attnkit.core.op import Op
from torch_attnkit.core.target import target_of
from torch_attnkit.oracle.attention import narrow_products
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity.judge import Arithmetic, arithmetic_of

_OF_TENSOR_CORES = 4  # parts
PART = 4 << 30  # bytes of a part's tensors and scores in float64, roughly: a reference holds several of these


def gate(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], got: Any, *, most: int | None = None) -> float:
    """Raise AssertionError unless ``got``, what the call wrote to and then what it returned, is right; the largest
    error as a fraction of its tolerance. ``args`` are as they were before the call.

    ``most`` is for where the reference is slow: it then looks at so many parts, evenly spread, and not at the others.
    It is slow with the sums of tensor cores, which some kernels' tolerance is derived from.
    """
    sums = arithmetic_of(op, target_of(next(a.device for a in args if isinstance(a, torch.Tensor))).arch, args, kwargs)
    if sums is not contextlib.nullcontext and most is None:
        most = _OF_TENSOR_CORES
    values = dict(zip(op.argnames, args, strict=False))
    outs = dict(zip((*op.mutated, *op.outnames), tensors_of(got), strict=True))
    parts = list(parts_of(op, values | outs))
    if most is not None:
        parts = [parts[i * len(parts) // most] for i in range(most)] if len(parts) > most else parts
    return max((_checked(op, part, values, outs, kwargs, sums) for part in parts), default=0.0)


def _checked(
    op: Op, part: Part, values: dict[str, Any], outs: dict[str, torch.Tensor], kwargs: dict[str, Any], sums: Arithmetic
) -> float:
    module = op.module("reference")
    reference = getattr(module, "numbers", module.reference)  # codes are judged by what they stand for

    def results(convert: Callable[[Any], Any]) -> list[torch.Tensor]:
        chosen = {n: convert(part.of(n, v)) for n, v in values.items()}
        written = {n: chosen[n].clone() for n in op.mutated}
        return [*written.values(), *tensors_of(reference(*(chosen | written).values(), **kwargs))]

    with narrow_products(), sums():
        low = results(lambda value: value)
    high = results(_double)
    if hasattr(module, "numbers"):
        local = [part.of(name, out) for name, out in outs.items()]
        cut = tuple(part.of(name, value) for name, value in values.items())
        return float(module.check(f"{op.name}{part}", local, list(zip(high, low, strict=True)), cut, kwargs))
    each = zip(outs.items(), low, high, strict=True)
    return max(check(f"{op.name} {name}{part}", part.of(name, out), r, r64) for (name, out), r, r64 in each)


@dataclass(frozen=True)
class Part:
    """One part of a call: of every axis that is cut the first index and the number, and where each tensor has it."""

    cuts: dict[str, tuple[int, int]]
    axes: dict[str, dict[str, int]] = field(repr=False)

    def of(self, name: str, value: Any) -> Any:
        """A tensor of the call, cut to the part; anything else as it is."""
        if isinstance(value, torch.Tensor):
            for axis, (first, count) in self.cuts.items():
                if name in self.axes.get(axis, {}):
                    value = value.narrow(self.axes[axis][name], first, count)
        return value

    def __str__(self) -> str:
        return "".join(f" {axis} {first}:{first + count}" for axis, (first, count) in self.cuts.items())


@dataclass
class Split:
    """Into how many pieces a call is cut: along its batch axis, KV heads, and query heads of a KV head."""

    batch: int = 1
    kv: int = 1
    group: int = 1


def parts_of(op: Op, tensors: dict[str, Any]) -> Iterator[Part]:
    """Parts that hold every element of every output once, each with all that it is computed from."""
    axes, size = _axes(op, tensors)
    batch = _batch(op, tensors, axes, size)
    split = _split(tensors, axes, size, batch)
    step = -(-size.get(batch or "", 1) // split.batch) or 1
    firsts = range(0, size[batch], step) if batch and split.batch > 1 else (0,)
    for first, kv, member in itertools.product(firsts, range(split.kv), range(split.group)):
        cuts = {batch: (first, min(step, size[batch] - first))} if batch and split.batch > 1 else {}
        if split.kv > 1 or split.group > 1:
            wide, heads = size["Hkv"] // split.kv, size["Hq"] // split.kv
            cuts |= {
                "Hkv": (kv * wide, wide),
                "Hq": (kv * heads + member * (heads // split.group), heads // split.group),
            }
        yield Part(cuts, axes)


def _split(tensors: dict[str, Any], axes: dict[str, dict[str, int]], size: dict[str, int], batch: str | None) -> Split:
    """The fewest pieces that are small enough, or the most that there are."""
    split = Split()
    most = Split(size[batch] if batch else 1)
    if size.get("Hkv") and "Hq" in axes:
        most.kv, most.group = size["Hkv"], size["Hq"] // size["Hkv"]
    # Heads first where caches have no axis for sequences: every part would otherwise take all of them.
    apart = batch is not None and all(n in axes[batch] for n in axes.get("Hkv", {}))
    for what in ("batch", "kv", "group") if apart else ("kv", "group", "batch"):
        while _bytes(tensors, axes, size, batch, split) > PART and getattr(split, what) < getattr(most, what):
            # A KV head by itself, then a query head: a part has one number of heads for each KV head.
            more = min(2 * split.batch, most.batch) if what == "batch" else getattr(most, what)
            setattr(split, what, more)
    return split


def _bytes(
    tensors: dict[str, Any], axes: dict[str, dict[str, int]], size: dict[str, int], batch: str | None, split: Split
) -> int:
    """What a part takes in float64: its tensors, and a score of each query and key of a sequence where there are such.

    A tensor that no cut makes smaller does not count, or weights of gigabytes would be read for every row by itself.
    """
    taken = 0
    cut = {name for axis in (batch or "", "Hkv", "Hq") for name in axes.get(axis, {})}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and name in cut:
            pieces = split.batch if batch and name in axes[batch] else 1
            pieces *= split.kv if name in axes.get("Hkv", {}) else 1
            pieces *= split.kv * split.group if name in axes.get("Hq", {}) else 1
            taken += tensor.numel() // pieces
    if "Hkv" in size and "Hq" in size:
        queries, keys = list(tensors.values())[:2]
        rows = queries.numel() // max(size["D"], 1) // split.batch // split.kv // split.group  # of all query heads
        taken += rows * keys.numel() // max(size["D"] * size["Hkv"], 1) // max(size.get("B", 1), 1)
    if {"Hi", "Tq", "Sk"} <= set(size):  # a product of each token, head and key of its request
        taken += size["Tq"] // split.batch * size["Hi"] * size["Sk"]
    return 8 * taken


def _axes(op: Op, tensors: dict[str, Any]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Of each axis the tensors that have it, with its position in each, and its size."""
    axes: dict[str, dict[str, int]] = {}
    size: dict[str, int] = {}
    for name, tensor in tensors.items():
        spec = op.spec(name)
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= len(spec.axes):  # not an output left empty
            named = {str(a): i - len(spec.axes) for i, a in enumerate(spec.axes)}
            if spec.batch and tensor.dim() > len(spec.axes):
                named["..."] = -tensor.dim()
            for axis, position in named.items():
                axes.setdefault(axis, {})[name] = position
                size[axis] = tensor.shape[position]
    return axes, size


def _batch(op: Op, tensors: dict[str, Any], axes: dict[str, dict[str, int]], size: dict[str, int]) -> str | None:
    """The axis along which outputs are computed independently of each other, if there is one."""
    outputs = [n for n in (*op.mutated, *op.outnames) if n in tensors and tensors[n].dim() >= len(op.spec(n).axes)]
    batch = next((a for a in ("...", "B", "R", "Tq") if size.get(a) and all(n in axes[a] for n in outputs)), None)
    # Tokens of one request cannot be told from another's here.
    return None if batch == "Tq" and ({"R", "B+1"} & set(axes) or size.get("Rk", 1) > 1) else batch


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)]
