"""Which cases cover a row, remembered on this machine: to find them, the arguments of thousands of calls are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_attnkit import digest
from torch_attnkit.core import cache, config
from torch_attnkit.core.op import Op

if TYPE_CHECKING:
    from .case import Case


def remembered(name: str, op: Op, find: Callable[[], Sequence[Case]]) -> list[tuple[Any, ...]]:
    """What ``find`` chooses for a row of ``op``: dtype, dims, features, shape and extra of each case.

    It is looked up in ``cache_dir()/cases``, under a digest of all that the choice depends on.
    """
    sources = digest.of_modules(f"{op.package}.op", f"{op.package}.cases", "torch_attnkit.parity.case")
    path = config.cache_dir() / "cases" / f"{name}-{digest.of(sources, torch.__version__)}.json"
    if cache.found(path) is None:
        found = _found(find)
        try:
            cache.write(path, json.dumps(found))
        except cache.Untrusted:
            raise
        except OSError:  # nowhere to remember it
            return found
    return [
        (dtype, tuple((axis, size) for axis, size in dims), tuple(features), shape, extra)
        for dtype, dims, features, shape, extra in json.loads(cache.checked(path).read_text())
    ]


def _found(find: Callable[[], Sequence[Case]]) -> list[tuple[Any, ...]]:
    return [(c.dtype, c.dims, c.features, c.shape, c.extra) for c in find()]
