"""The parity cases of a row: dtype x dims x features x shapes, and extra ones; and the inputs of each.

The shapes of the product are those of ``PARITY`` in the op's ``cases.py``: in all of them features have something to
do. Those of ``DEGENERATE`` (no queries, no keys, a single key, rows that see nothing) are extra cases, without features
and with all of them, and so are the values of ``EXTRAS`` (NaN, infinities), which ``extra.py`` puts into inputs.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Call, Op
from torch_attnkit.core.spec import DTYPES

from .chosen import remembered
from .covering import covering as covering_array
from .extra import spoiled, touches
from .shapes_only import ShapesOnly

Dims = tuple[tuple[str, int], ...]
_COMPILED = 3  # columns that decide what is compiled: dtype, dims and features


@dataclass(frozen=True)
class Case:
    """One call of one row. Its id is the address of the row: ``sdpa_decode[sm90-bf16-D128-gqa+sink-ragged]``.

    ``extra`` comes from the op's ``EXTRAS`` and ends the id: ``sdpa_decode[sm90-bf16-D128-plain-ragged-nan:q]``.
    """

    op: str
    row: int
    arch: str
    dtype: str
    dims: Dims
    features: tuple[str, ...]
    shape: str
    extra: str = ""

    @property
    def id(self) -> str:
        dims = "-".join(f"{axis}{size}" for axis, size in self.dims)
        parts = (self.arch, self.dtype, dims, "+".join(self.features) or "plain", self.shape, self.extra)
        return f"{self.op}[{'-'.join(p for p in parts if p)}]"


def shapes(op: Op) -> dict[str, dict[str, int]]:
    """The sizes of all shapes of an op by their names: the ordinary ones, then the degenerate."""
    module = op.module("cases")
    return {**module.PARITY, **module.DEGENERATE}


def feature_sets(op: Op, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """No feature, each alone, all together; where features exclude each other, all with the one and with the other."""
    return list(dict.fromkeys([(), *((n,) for n in names), *all_features(op, names)]))


def all_features(op: Op, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All features; where some exclude each other, all with the one and with the other."""
    sets = []
    for i in range(max(map(len, op.exclusive), default=1)):
        dropped = {n for group in op.exclusive for n in set(group) - {group[i % len(group)]}}
        sets.append(tuple(n for n in names if n not in dropped))
    return list(dict.fromkeys(sets))


def cases(op: Op, index: int, arch: str, *, covering: bool = False) -> list[Case]:
    """All cases of one row on one arch, the extra ones last.

    ``covering`` keeps a few that the row accepts, in which every two of a dtype, dims, a feature set and a shape meet
    that can (``covering.py``), and one of each extra case, of dtypes, dims and features that the others have.
    """
    row = op.kernels[index]
    axes = [[(axis, size) for size in sizes] for axis, sizes in row.dims.items()]
    dtypes, sizes = row.dtypes.split(), list(itertools.product(*axes))
    names = tuple(row.features.split())
    columns: list[list[Any]] = [dtypes, sizes, feature_sets(op, names), list(op.module("cases").PARITY)]
    made = lambda choice: Case(op.name, index, arch, *choice)
    if not covering:
        found = list(map(made, itertools.product(*columns)))
        extra = [made((d, s, *rest)) for d, s in itertools.product(dtypes, sizes) for rest in _extras(op, names)]
        return found + extra

    def few() -> list[Case]:
        found = list(map(made, covering_array(columns, lambda choice: accepted(made(choice)), _COMPILED)))
        return found + list(_reused(found, [made((dtypes[0], sizes[0], *rest)) for rest in _extras(op, names)]))

    return [made(choice) for choice in remembered(f"{op.name}-{index}", op, few)]  # whatever the arch


def _extras(op: Op, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """The features, the shape and the extra of each extra case, for a row with the features ``names``."""
    module = op.module("cases")
    all_of_them = all_features(op, names)
    for shape, features in itertools.product(module.DEGENERATE, dict.fromkeys([(), *all_of_them])):
        yield features, shape, ""
    for extra, shape, *wanted in getattr(module, "EXTRAS", ()):
        for features in all_of_them if wanted == ["all"] else [tuple(wanted)]:
            if set(features) <= set(names) and touches(op, extra, features):
                yield features, shape, extra


def _reused(found: list[Case], extra: list[Case]) -> Iterator[Case]:
    """The extra cases that the row accepts, each with the dtype and dims of a case of its features.

    That is one of its shape, if there is one, or of the first: what is compiled for the one is there for the other.
    """
    for case in extra:
        like = [c for c in found if c.features == case.features]
        like.sort(key=lambda c: (c.shape != case.shape, c.shape != found[0].shape))
        each = (replace(case, dtype=c.dtype, dims=c.dims) for c in like)
        yield from itertools.islice(filter(accepted, each), 1)


def accepted(case: Case) -> bool:
    """Whether the row takes the case, and the call uses the features that the case names."""
    op = OPS[case.op]
    row = op.kernels[case.row]
    with ShapesOnly():
        call = bound(op, *arguments(replace(case, extra="")))
    return row.refusal(call) is None and set(case.features) <= set(call.features)


def arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments for a case."""
    op = OPS[case.op]
    return inputs(op, case.shape, DTYPES[case.dtype], case.features, case.dims, case.extra)


def inputs(
    op: Op, shape: str, dtype: torch.dtype, features: tuple[str, ...], dims: Dims = (), extra: str = ""
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments for one case; the same case always gets the same numbers.

    ``dims`` replaces sizes of the shape; where a shape has Dv equal to D, Dv follows D.
    """
    args, kwargs = generate(op, shape, shapes(op)[shape], dtype, features, dims)
    return (spoiled(op, extra, args), kwargs) if extra else (args, kwargs)


def generate(
    op: Op, shape: str, sizes: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], dims: Dims
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``inputs`` for the given sizes of a shape, whose name the random numbers depend on."""
    if "Dv" in sizes and sizes["Dv"] == sizes.get("D") and "Dv" not in dict(dims):
        dims = (*dims, *(("Dv", size) for axis, size in dims if axis == "D"))
    gen = torch.Generator().manual_seed(zlib.crc32(repr((op.name, shape, features, dims)).encode()))
    made: tuple[tuple[Any, ...], dict[str, Any]] = op.module("cases").make(sizes | dict(dims), dtype, features, gen)
    return made


def bound(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call with its names bound, for arguments as ``inputs`` makes them."""
    return op.bind((*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :])))
