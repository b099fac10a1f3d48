"""Compile kernels ahead of time, on a machine without a GPU if need be: ``python -m torch_attnkit warmup``.

What a row needs compiled is found by planning calls: the parity cases of the table and the bench cases, on CPU tensors
that hold nothing, with every launcher recorded instead of compiled. With ``--models`` the calls are those that servers
and transformers make of named models (``served/``). The requests are plain data, so processes compile
them side by side into the cache or into a bundle, a folder that ``ATTNKIT_CACHE_DIR`` or ``compile.use_bundle`` names.
"""

from __future__ import annotations

import collections
import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .core import UnsupportedError, config
from .core.dispatch import FORMS, OPS, build, resolve
from .core.op import NAMESPACE, Call, Kernel, Op
from .core.spec import DTYPES
from .core.target import Target
from .cuda import compile, compile_times
from .served import calls
from .served.models import Model, named
from .served.wheel import write as write_wheel

MODEL_DTYPES = ("bf16", "f16")
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def warmup(
    target: str,
    out: Path | None = None,
    op: str | None = None,
    jobs: int = 0,
    models: list[str] | None = None,
    dtypes: tuple[str, ...] = MODEL_DTYPES,
    wheel: Path | None = None,
) -> int:
    """Compile every kernel of ``target``, a key of ``compile.GPU_ARCH``, of one op, or what ``models`` of
    ``served.models`` (or "all") ask for in ``dtypes``, into ``out`` or the cache; count the failures.

    ``jobs`` is the number of processes, by default one a core. What is in the folder already is not compiled again.
    Ops and models' calls that ``target`` has no kernel of are named. With ``wheel``, a folder, what models ask for is
    put into a wheel there, too (``served/wheel.py``).
    """
    if wheel is not None and not models:
        raise ValueError("warmup: a wheel is of models' kernels, accepted: --wheel with --models")
    if target not in compile.GPU_ARCH:
        raise ValueError(f"warmup: target is {target!r}, accepted: {', '.join(compile.GPU_ARCH)}")
    if op is not None and op not in OPS:
        raise ValueError(f"warmup: there is no op {op!r}, accepted: {', '.join(OPS)}")
    if (wrong := next((d for d in dtypes if d not in MODEL_DTYPES), None)) is not None:
        raise ValueError(f"warmup: dtype is {wrong!r}, accepted: {', '.join(MODEL_DTYPES)}")
    if op is not None and not models and op not in (ops := _of(target)):
        raise ValueError(f"warmup: {target} has no kernel of {op}, accepted: {', '.join(ops)}")
    wanted = models and named(models)  # before the compiler is asked for
    compile.version(compile.COMPILER)
    console = Console()
    folder = (out or config.cache_dir()).resolve() / "cuda"
    if wanted:
        found = _served(target, wanted, dtypes, op)
        asked, lacking = list(found.kernels), found.lacking()
    else:
        asked = requests(target, op)
        lacking = [] if op else [name for name in OPS if name not in _of(target)]
    if lacking:
        console.print(f"{target} has no kernel of {', '.join(lacking)}: UnsupportedError", soft_wrap=True)
    failures = fill(asked, folder, console, jobs)
    if out is not None:
        for lock in folder.glob("*.lock"):
            lock.unlink()
        console.print(f"use it with ATTNKIT_CACHE_DIR={out} or torch_attnkit.cuda.compile.use_bundle({str(out)!r})")
    if wheel is not None and models and not failures:
        path = write_wheel(asked, folder, wheel, f"{', '.join(models)} in {', '.join(dtypes)}")
        console.print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
    return failures


def fill(wanted: list[compile.Request], folder: Path, console: Console, jobs: int = 0) -> int:
    """Compile ``wanted`` into ``folder`` in ``jobs`` processes, by default one a core; count the failures."""
    jobs = min(jobs or os.cpu_count() or 1, max(1, len(wanted)))
    failed = []
    with Progress(*COLUMNS, console=console) as progress:
        task = progress.add_task(f"{len(wanted)} kernels, {jobs} processes", total=len(wanted))
        # Not forked: the parent's threads would hang a child of torch and cutlass.
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            # The longest first: no process is left alone with one at the end.
            ordered = sorted(wanted, key=lambda request: -compile_times.of(request.name))
            running = {pool.submit(compile.compile_into, request, folder): request for request in ordered}
            for done in as_completed(running):
                if (error := done.exception()) is not None:
                    failed.append(str(error))
                progress.advance(task)
    for message in failed:
        console.print(f"[red]{message}[/red]", soft_wrap=True)
    console.print(f"{len(wanted) - len(failed)} of {len(wanted)} kernels are in {folder}", soft_wrap=True)
    return len(failed)


class asked_by(TorchDispatchMode):
    """``kernels``: every distinct kernel that the calls of ``torch.ops.attnkit.*`` in this block ask for on ``arch``.

    For fake tensors, of a whole model for instance: nothing is computed, compiled or launched.
    """

    def __init__(self, arch: str) -> None:
        super().__init__()
        self.target = Target(arch)
        self.kernels: dict[compile.Request, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            op = (OPS | FORMS)[func.overloadpacket.__name__]
            call = _bind(op, args, kwargs)
            with compile.recording() as asked:
                build(op.base or op, call, self.target)
            self.kernels |= dict.fromkeys(asked)
        return func(*args, **kwargs)


def served(
    arch: str, models: dict[str, Model], dtypes: Iterable[str] = MODEL_DTYPES, only: str | None = None
) -> list[compile.Request]:
    """Every distinct kernel that the calls of ``models`` ask for on ``arch``. Calls that no row takes ask for none."""
    return list(_served(arch, models, dtypes, only).kernels)


class _Served(NamedTuple):
    """What calls of models come to: the kernels, and of each op the calls and those that no row takes."""

    kernels: dict[compile.Request, None]
    calls: collections.Counter[str]
    refused: collections.Counter[str]

    def lacking(self) -> list[str]:
        """In words, the ops of which calls are refused."""
        return [f"{op} ({n} of {self.calls[op]} calls)" if n < self.calls[op] else op for op, n in self.refused.items()]


def _served(arch: str, models: dict[str, Model], dtypes: Iterable[str], only: str | None) -> _Served:
    target, found = Target(arch), _Served({}, collections.Counter(), collections.Counter())
    for asked in calls.of_models(models.values(), [DTYPES[d] for d in dtypes]):
        if only in (None, asked.op):
            kernels = kernels_of(asked, target)
            found.kernels.update(dict.fromkeys(kernels or ()))
            found.calls[asked.op] += 1
            if kernels is None:
                found.refused[asked.op] += 1
    return found


def _of(arch: str) -> list[str]:
    """The ops that have kernels for ``arch``."""
    return [name for name, op in OPS.items() if any(arch in row.archs for row in op.kernels)]


def kernels_of(asked: calls.Asked, target: Target) -> list[compile.Request] | None:
    """The kernels that a call asks for; None where the op or its rows refuse it."""
    op = OPS[asked.op]
    with compile.recording() as kernels:
        try:
            call = _bind(op, asked.args, asked.options)
            if (row := resolve(op, call, target)) is not None:
                op.build(row, call, target)
        except (TypeError, ValueError, UnsupportedError):
            return None
    return kernels


def requests(arch: str, only: str | None = None, *, covering: bool = False) -> list[compile.Request]:
    """Every distinct kernel that the parity and bench cases of the table ask for on ``arch``.

    With ``covering``, those of the parity cases that ``parity.cases`` keeps, alone: what a test run simulates.
    """
    target = Target(arch)
    found: dict[compile.Request, None] = {}
    for op in OPS.values():
        rows = [row for row in op.kernels if arch in row.archs and only in (None, op.name)]
        mode = FakeTensorMode()
        with compile.recording() as asked:
            for row in rows:
                for call in _parity_calls(op, row, covering):
                    _build(op, row, call, target)
            for call in () if covering else _bench_calls(op, rows, mode):
                for row in rows:
                    with mode:
                        _build(op, row, call, target)
        found |= dict.fromkeys(asked)
    return list(found)


def _build(op: Op, row: Kernel, call: Call, target: Target) -> None:
    if row.refusal(call) is None:
        op.build(row, call, target)


def _parity_calls(op: Op, row: Kernel, covering: bool) -> Iterator[Call]:
    """One bound call for each parity case of a row, contiguous and strided."""
    from . import parity

    for case in parity.cases(op, op.kernels.index(row), row.archs[0], covering=covering):
        with parity.ShapesOnly():
            args, kwargs = parity.arguments(case)
            embedded = [tuple(_embedded(a, layout) for a in args) for layout in parity.LAYOUTS]
        for tensors in embedded:
            yield _bind(op, tensors, kwargs)


def _bench_calls(op: Op, rows: list[Kernel], mode: FakeTensorMode) -> Iterator[Call]:
    """One bound call for each bench case and dtype that one of the rows may take, of tensors of ``mode``.

    Where lengths and tables decide on inputs, they are real; other tensors hold what was in memory before.
    """
    from . import parity

    dtypes = dict.fromkeys(d for row in rows for d in row.dtypes.split() if d in ("bf16", "f16", "f8e4m3"))
    for dims, dtype in itertools.product(op.module("cases").BENCH.values(), dtypes):
        for tensors in (mode, parity.ShapesOnly("meta"), parity.ShapesOnly()):
            try:
                with tensors:
                    args, kwargs = bench_inputs(op, dims, DTYPES[dtype], torch.Generator())
            except Exception:  # tensors without data that inputs depend on; a dtype that a case does not have
                continue
            materialised_kwargs = {name: parity.materialised(value) for name, value in kwargs.items()}
            yield _bind(op, tuple(map(parity.materialised, args)), materialised_kwargs)
            break


def bench_inputs(
    op: Op, dims: dict[str, int], dtype: torch.dtype, gen: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a bench case: by ``bench`` of the op's cases, else by ``make`` with what ``dims`` switch on."""
    cases = op.module("cases")
    if hasattr(cases, "bench"):
        made: tuple[tuple[Any, ...], dict[str, Any]] = cases.bench(dims, dtype, gen)
        return made
    features = [f for f in op.features if dims.get(f) not in (None, 0, -1)]
    if "gqa" in op.features and dims.get("Hq") != dims.get("Hkv"):
        features.append("gqa")
    args, kwargs = cases.make(dims, dtype, tuple(features), gen)
    return args, kwargs | {k: type(kwargs[k])(v) for k, v in dims.items() if k in kwargs}


def _embedded(value: Any, layout: str) -> Any:
    from . import parity

    return parity.embed(value, "cpu", layout) if isinstance(value, torch.Tensor) else value


def _bind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    rest = (kwargs.get(name, op.defaults.get(name)) for name in op.argnames[len(args) :])
    return op.bind((*args, *rest))
