"""The ops on ``torch.distributed.tensor``: rules that say which parts of a call processes may compute alone.

They follow from ``dims`` and ``shards`` of the table: a tensor is cut where one of its axes is named, and is whole
otherwise. A rule is offered for a call if the parts are equal and the op accepts them; DTensor chooses among these by
what has to be moved, as for its own ops. Inputs that lie otherwise are gathered first, which DTensor does unasked.

Rules are given to DTensor when it is imported, be that before or after this package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Call, Op, Shards
from torch_attnkit.when_imported import when_imported

Cuts = dict[str, int | None]  # tensor -> the axis that is cut


def register_when_imported() -> None:
    """Give the rules to DTensor, at once if it has been imported already."""
    when_imported("torch.distributed.tensor", _register)


def _register(tensor: ModuleType) -> None:
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    for op in OPS.values():
        overload = getattr(torch.ops.attnkit, op.name).default
        register_sharding(overload)(rule(op))
        # As register_sharding leaves it, the cache of rules takes calls that differ in a bool or a str for the same.
        named = list(op.argnames[op.positional :])
        propagator.op_to_schema_info[overload] = RuntimeSchemaInfo(static_kwargkey=named, needs_pytree=True)


def rule(op: Op) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The sharding function of an op as DTensor wants it: placements of outputs and of the given inputs, each a way."""

    def ways(*specs: Any, **named: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        named = dict(zip(op.argnames, specs, strict=False)) | named
        metas = {n: _meta(named.get(n)) for n in op.tensors}
        values = tuple(metas[n] if n in metas else named.get(n, op.defaults.get(n)) for n in op.argnames)
        given = [n for n in op.tensors if metas[n] is not None]
        whole: tuple[list[Any], list[Any]] = ([Replicate() for _ in op.outnames], [Replicate() for _ in given])
        first = named[given[0]]
        if op.mutated:  # DTensor would write to what it gathered, and drop that
            for name in given:
                if not named[name].is_replicated():
                    raise ValueError(
                        f"{op.name}: {name} is {named[name].placements}, accepted: Replicate(), since {op.whole}"
                    )
        found = [whole]
        for sums, cuts in ways_of(op, op.bind(values), _parts(first.mesh)):

            def placement(name: str, sums: set[str] = sums, cuts: Cuts = cuts) -> Any:
                at = cuts.get(name)
                return Partial() if name in sums else Replicate() if at is None else Shard(at)

            found.append(([placement(n) for n in op.outnames], [placement(n) for n in given]))
        return found

    return ways


def ways_of(op: Op, call: Call, parts: tuple[int, ...]) -> Iterator[tuple[set[str], Cuts]]:
    """Of each way to cut a call into as many equal parts as each of ``parts`` says: what is summed, and what is cut."""
    for shards in op.shards:
        if all(ok(call) for ok in shards.needs.values()):
            for axes in _axes(shards, call):
                cuts = {name: _cut(op, call, name, axes) for name in (*op.tensors, *op.outnames)}
                if _equal(op, call, cuts, parts):
                    yield set(shards.sums.split()), cuts


def _axes(shards: Shards, call: Call) -> list[set[str | int]]:
    """The axes that are cut together, by name, batch axes by their place."""
    return [{i} for i in range(len(call.batch))] if shards.axes == "..." else [set(shards.axes.split())]


def _cut(op: Op, call: Call, name: str, axes: set[str | int]) -> int | None:
    """Where tensor ``name`` is cut, if it is there and has one of ``axes``."""
    if (name in op.tensors and getattr(call.arg, name) is None) or (name in op.unless and op.unless[name](call)):
        return None
    spec = op.spec(name, call)
    if spec.spread and not getattr(call.arg, name).dim():
        return None
    names = [*(range(len(call.batch)) if spec.batch else ()), *(axis.name for axis in spec.axes)]
    return next((i for i, axis in enumerate(names) if axis in axes), None)


def _equal(op: Op, call: Call, cuts: Cuts, parts: tuple[int, ...]) -> bool:
    """Whether the inputs can be cut into equal parts, as often as they can be cut at all, of which the op takes one.

    DTensor itself leaves out parts of which an axis has too few.
    """
    possible = False
    tensors = {n: getattr(call.arg, n) for n in op.tensors}
    sizes = [t.shape[cuts[n]] for n, t in tensors.items() if cuts[n] is not None]
    for count in parts:
        if not sizes or any(count > size for size in sizes):
            continue
        if any(size % count for size in sizes):
            return False
        local = [_part(t, cuts[n], count) for n, t in tensors.items()]
        try:
            op.bind((*local, *(getattr(call.arg, n) for n in op.argnames[len(local) :])))
        except (TypeError, ValueError):
            return False
        possible = True
    return possible


def _part(tensor: torch.Tensor | None, at: int | None, count: int) -> torch.Tensor | None:
    return tensor if tensor is None or at is None else tensor.narrow(at, 0, tensor.shape[at] // count)


def _meta(spec: Any) -> torch.Tensor | None:
    """What DTensor knows of a tensor, as one without contents."""
    if spec is None:
        return None
    known = spec.tensor_meta
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")


def _parts(mesh: Any) -> tuple[int, ...]:
    """Into how many parts an axis may be cut: by one dimension of the mesh, or by several."""
    dims = [mesh.size(i) for i in range(mesh.ndim)]
    chosen = itertools.chain.from_iterable(itertools.combinations(dims, n) for n in range(1, len(dims) + 1))
    return tuple(sorted({math.prod(some) for some in chosen}))
