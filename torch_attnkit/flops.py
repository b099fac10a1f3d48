"""What the ops count as for ``torch.utils.flop_counter``: the ``flops.py`` of those ops that have matrix products.

A formula is given to PyTorch when its counter is imported, be that before or after this package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_attnkit.core.dispatch import FORMS, OPS
from torch_attnkit.core.op import Op
from torch_attnkit.when_imported import when_imported


def register_when_imported() -> None:
    """Give the formulas to PyTorch's counter, at once if it has been imported already."""
    when_imported("torch.utils.flop_counter", _register)


def _register(counter: ModuleType) -> None:
    for op in (*OPS.values(), *FORMS.values()):
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
