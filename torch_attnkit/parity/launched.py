"""What a case runs: the kernels that its call launches, and torch's operations around them, each by what it does.

A call is planned and launched as ever, but the runtimes only record. A CUDA kernel counts by
its fingerprint (``cuda/fingerprint.py``), a Metal kernel by its text behind the preprocessor, and both by the grid and
by what they are given: scalars, and of tensors dtype, shape, strides, alignment, and which of them share memory. Names
of modules, classes and functions are in none of this, so code may move, and what a launch does may not change.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_attnkit import digest
from torch_attnkit.core import Op, Target, dispatch, simulate
from torch_attnkit.cuda import compile, workspace
from torch_attnkit.mps import library as metal
from torch_attnkit.sim.metal import compiler

from .case import Case, arguments, bound
from .guard import LAYOUTS, embed
from .shapes_only import ShapesOnly

_ALLOCATIONS = {"empty.memory_format", "empty_strided.default", "new_empty.default", "empty_like.default"}
_ALIGNMENT = 16  # bytes; no kernel reads more at once
_MOST_THREADS = 1024
_METAL = 320  # __METAL_VERSION__
_LIMIT = re.compile(r"max_total_threads_per_threadgroup\(([\d\s*()]+)\)[^{;]*?\bvoid\s+(\w+)\s*\(")
_MARKER = re.compile(r"^#[^\n]*\n", re.M)


def by(case: Case, target: Target) -> str:
    """The digest of what ``case`` runs on ``target``, in every layout, compiled where it has not been."""
    op = dispatch.OPS[case.op]
    shared = getattr(op.module("cases"), "shared", lambda row, args: None)
    with ShapesOnly():
        args, kwargs = arguments(case)
        embedded = [tuple(embed(a, "cpu", lay) if isinstance(a, torch.Tensor) else a for a in args) for lay in LAYOUTS]
    row = op.kernels[case.row]
    if row.refusal(bound(op, args, kwargs)) is not None:  # by what it needs: the case is not the row's
        return "refused"
    embedded += filter(None, [shared(row, each) for each in embedded])
    return digest.of(*(_launched(op, each, kwargs, target) for each in embedded))


def _launched(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target) -> str:
    values = (*args, *(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :]))
    recorder = _Recorder(values)
    workspace._devices.clear()  # its size depends on earlier calls
    built = functools.partial(dataclasses.replace, built_for=target.built_for)
    cuda = compile.recording(lambda request: recorder.launcher(compile.get(built(request), simulated=True).fingerprint))
    with simulate(target.arch), cuda, metal.recording(recorder.library):
        launch = dispatch.make_plan(op, values).launch
        with recorder:
            launch(*values)
    return digest.of(*recorder.lines)


class _Recorder(TorchDispatchMode):
    """A line for each launch and for each of torch's operations that is neither a view nor an allocation."""

    def __init__(self, arguments: tuple[Any, ...]):
        super().__init__()
        self.lines: list[str] = []
        self.storages: dict[int, int] = {}  # storage -> a number, in the order in which they are met
        self.kept: list[torch.Tensor] = []  # so that no storage's address comes again
        self.described(arguments)

    def launcher(self, kernel: str) -> Callable[..., None]:
        return lambda *args, **how: self.record(kernel, args, how)

    def library(self, text: str) -> metal.Library:
        """A Metal library whose kernels are recorded by their whole text."""
        preprocessed, limits = _preprocessed(text)
        return metal.Library(_Kernels(self, digest.of(preprocessed), limits), metal.slots(text))

    def record(self, what: str, args: Any, how: dict[str, Any]) -> None:
        self.lines.append(f"{what} {self.described(args)} {self.described(tuple(sorted(how.items())))}")

    def described(self, value: Any) -> str:
        """A value without what differs from run to run."""
        if isinstance(value, torch.Tensor):
            self.kept.append(value)
            number = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
            at = (number, value.storage_offset(), value.data_ptr() % _ALIGNMENT if not value.is_meta else 0)
            return f"{value.dtype}{tuple(value.shape)}{value.stride()}@{at}"
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(self.described, value))})"
        return repr(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__ not in _ALLOCATIONS and not _is_view(func, args, out):
            self.record(f"{func} -> {self.described(out)}", args, kwargs or {})
        return out


def _is_view(func: Any, args: Any, out: Any) -> bool:
    source = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if source is None or not isinstance(out, torch.Tensor) or func._schema.is_mutable:
        return False
    return bool(out.untyped_storage()._cdata == source.untyped_storage()._cdata)


class _Kernels:
    """Stands in for a compiled Metal library: its kernels record their launches."""

    def __init__(self, recorder: _Recorder, text: str, limits: dict[str, int]):
        self._recorder, self._text, self._limits = recorder, text, limits

    def __getattr__(self, name: str) -> Any:
        kernel = _Kernel()
        kernel.launch = self._recorder.launcher(f"{self._text} {name}")
        kernel.max_threads_per_threadgroup = self._limits.get(name, _MOST_THREADS)
        return kernel


class _Kernel:
    launch: Callable[..., None]
    max_threads_per_threadgroup: int

    def __call__(self, *args: Any, **how: Any) -> None:
        self.launch(*args, **how)


@functools.cache
def _preprocessed(text: str) -> tuple[str, dict[str, int]]:
    """A Metal text behind the preprocessor, without layout, and the threads that its kernels allow."""
    with TemporaryDirectory() as folder:
        bare = " ".join(_MARKER.sub("", compiler.preprocess(text, _METAL, Path(folder))).split())
    return bare, {name: math.prod(map(int, re.findall(r"\d+", limit))) for limit, name in _LIMIT.findall(bare)}
