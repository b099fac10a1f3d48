"""What the ops count as for ``torch.utils.flop_counter``: the ``flops.py`` of those ops that have matrix products.

A formula is given to PyTorch when its counter is imported, be that before or after this package: importing the counter
costs more than all of ours, and most programs never do.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.op import Op

_COUNTER = "torch.utils.flop_counter"


class _WhenImported(MetaPathFinder):
    """Finds the counter where everyone does, and has the formulas registered once its module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                del loader.exec_module  # the loader's own again
                _register(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Give the formulas to PyTorch's counter, at once if it has been imported already."""
    if (module := sys.modules.get(_COUNTER)) is not None:
        _register(module)
    else:
        sys.meta_path.insert(0, _WhenImported())


def _register(counter: ModuleType) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _WhenImported)]
    for op in OPS.values():
        packet = getattr(torch.ops.attnkit, op.name)
        if packet not in counter.flop_registry and importlib.util.find_spec(f"{op.package}.flops"):
            counter.register_flop_formula(packet, get_raw=True)(formula(op))


def formula(op: Op) -> Callable[..., int]:
    """The formula of an op as PyTorch wants it: called like the op, with what it returned as ``out_val``."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        values = args + tuple(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :])
        counted: int = op.module("flops").flops(op.bind(values))
        return counted

    return count
