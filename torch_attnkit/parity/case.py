"""The parity cases of a row: dtype x dims x features x shapes, and the inputs of each."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core.op import Call, Op


@dataclass(frozen=True)
class Case:
    """One call of one row. Its id is the address of the row: ``sdpa_decode[sm90-bf16-D128-gqa+sink-ragged]``."""

    op: str
    row: int
    arch: str
    dtype: str
    dims: tuple[tuple[str, int], ...]
    features: tuple[str, ...]
    shape: str

    @property
    def id(self) -> str:
        dims = "-".join(f"{axis}{size}" for axis, size in self.dims)
        parts = (self.arch, self.dtype, dims, "+".join(self.features) or "plain", self.shape)
        return f"{self.op}[{'-'.join(p for p in parts if p)}]"


def feature_sets(op: Op, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """No feature, each alone, all together; where features exclude each other, all with the one and with the other."""
    together = []
    for i in range(max(map(len, op.exclusive), default=1)):
        dropped = {n for group in op.exclusive for n in set(group) - {group[i % len(group)]}}
        together.append(tuple(n for n in names if n not in dropped))
    return list(dict.fromkeys([(), *((n,) for n in names), *together]))


def cases(op: Op, index: int, arch: str, *, covering: bool = False) -> list[Case]:
    """All cases of one row on one arch; ``covering`` keeps a subset with every dtype, dim, feature set and shape."""
    row = op.kernels[index]
    axes = [[(axis, size) for size in sizes] for axis, sizes in row.dims.items()]
    columns: list[list[Any]] = [
        row.dtypes.split(),
        list(itertools.product(*axes)),
        feature_sets(op, tuple(row.features.split())),
        list(op.module("cases").PARITY),
    ]
    if covering:
        longest = max(len(c) for c in columns)
        picked: Any = [tuple(c[i % len(c)] for c in columns) for i in range(longest)]
    else:
        picked = itertools.product(*columns)
    return [Case(op.name, index, arch, *choice) for choice in dict.fromkeys(picked)]


def inputs(
    op: Op, shape: str, dtype: torch.dtype, features: tuple[str, ...], dims: tuple[tuple[str, int], ...] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments for one case; the same case always gets the same numbers.

    ``dims`` replaces sizes of the shape; where a shape has Dv equal to D, Dv follows D.
    """
    module = op.module("cases")
    sizes = module.PARITY[shape]
    if "Dv" in sizes and sizes["Dv"] == sizes.get("D") and "Dv" not in dict(dims):
        dims = (*dims, *(("Dv", size) for axis, size in dims if axis == "D"))
    gen = torch.Generator().manual_seed(zlib.crc32(repr((op.name, shape, features, dims)).encode()))
    made: tuple[tuple[Any, ...], dict[str, Any]] = module.make(sizes | dict(dims), dtype, features, gen)
    return made


def bound(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call with its names bound, for arguments as ``inputs`` makes them."""
    return op.bind((*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :])))
