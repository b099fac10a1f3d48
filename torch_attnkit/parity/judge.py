"""Run one parity case and judge it: right values, nothing else written, inputs untouched, on the target meant."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from torch_attnkit.core import Target, UnsupportedError, dispatch, simulate
from torch_attnkit.core.op import Op
from torch_attnkit.oracle.attention import narrow_products
from torch_attnkit.oracle.compare import check
from torch_attnkit.oracle.hopper_sums import TensorCoreSums

from .case import Case, arguments, bound
from .guard import embed, guarded_outputs
from .runners import Runner

# That a process judges before another takes its place. Two took 8 GB each after 1300 cases of sm100 in the simulator.
_CALLS = 250
Arithmetic = Callable[[], contextlib.AbstractContextManager[Any]]


def reference_of(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], *, double: bool, function: str = "reference",
    arithmetic: Arithmetic = contextlib.nullcontext,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What the call writes in place and returns, by the reference; ``double`` runs it on the same numbers in float64,
    else it runs inside ``arithmetic``. Another ``function`` of the reference's module is called as it would be.

    In float64 are the model tensors, and what is returned in a chosen dtype. A tensor that is float32 by contract stays
    what it is: it holds the same numbers.
    """

    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.double() if double and value.dtype in op.spec(name).model() else value.clone()

    if any(op.spec(n).spread and a is not None and not a.dim() for n, a in zip(op.tensors, args, strict=False)):
        args = dispatch.read(dispatch.made(op, bound(op, args, kwargs), whole=False), args)
    copies = [convert(name, value) for name, value in zip(op.argnames, args, strict=False)]
    if double and "dtype" in op.argnames:
        kwargs = kwargs | {"dtype": torch.float64}
    with contextlib.ExitStack() as stack:
        if not double:
            stack.enter_context(narrow_products())
            stack.enter_context(arithmetic())
        out = getattr(op.module("reference"), function)(*copies, **kwargs)
    mutated = [copies[op.argnames.index(n)] for n in op.mutated]
    return (*mutated, *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out))


def run(case: Case, device: str = "cpu", layout: str = "contiguous") -> float | None:
    """Run one case; raises AssertionError if it is wrong. Returns the largest error as a fraction of its tolerance.

    A case that the row's ``needs`` exclude is not the row's to run: None, which is neither right nor wrong. Where
    ``shared`` of the op's cases says that tensors of the row's calls may be one, the case is run so, too.
    """
    op = dispatch.OPS[case.op]
    row = op.kernels[case.row]
    args, kwargs = arguments(case)
    if row.refusal(bound(op, args, kwargs)) in row.needs:
        return None
    moved = tuple(embed(a, device, layout) if isinstance(a, torch.Tensor) else a for a in args)
    error = judge(case.id, op, case.arch, args, moved, kwargs)
    shared: Callable[..., Any] = getattr(op.module("cases"), "shared", lambda row, args: None)
    one = shared(row, args)
    if one is None:
        return error
    return max(error, judge(f"{case.id} with one tensor for two", op, case.arch, one, shared(row, moved), kwargs))


def judge(
    name: str,
    op: Op,
    arch: str,
    args: tuple[Any, ...],
    moved: tuple[Any, ...],
    kwargs: dict[str, Any],
    alike: Iterable[tuple[Any, ...]] = (),
) -> float:
    """Call the op with ``moved``, which are ``args`` on the device, and compare with the reference on ``args``."""
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in moved]
    device = next(a.device.type for a in moved if isinstance(a, torch.Tensor))
    with contextlib.ExitStack() as stack:
        if device == "cpu" and arch != "cpu":
            stack.enter_context(simulate(arch))
        fences = stack.enter_context(guarded_outputs())
        out = getattr(torch.ops.attnkit, op.name)(*moved, **kwargs)
        plan = dispatch.plan_of(op.name, *moved, **kwargs)
    if plan is None or not plan.where.startswith(arch):
        raise AssertionError(f"{name} ran on {plan and plan.where}")
    for fence in fences:
        fence.check(name)
    got = [*mutated(op, moved), *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out)]
    unchanged(name, op, before, moved)
    return verdict(name, op, got, args, kwargs, alike, arithmetic_of(op, arch, args, kwargs))


def arithmetic_of(op: Op, arch: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arithmetic:
    """What the reference runs in where a kernel's sums are not float32's: the launcher of its row says so."""
    row = dispatch.resolve(op, bound(op, args, kwargs), Target(arch))
    narrow = row is not None and row.launcher is not None and row.launcher.narrow_sums
    return TensorCoreSums if narrow else contextlib.nullcontext


def verdict(
    name: str,
    op: Op,
    got: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    alike: Iterable[tuple[Any, ...]] = (),
    arithmetic: Arithmetic = contextlib.nullcontext,
) -> float:
    """Compare ``got``, what the call wrote in place and returned, with the reference on ``args``.

    The tolerance is a multiple of the reference's own error. A call with few results shows that error in few places, by
    luck in none; ``alike`` are arguments of the same call with other numbers, and a result may be off by what the
    reference is off by on one of them, too.

    Where results are codes of numbers that are computed, the reference's module has ``numbers``, what they are codes
    of, and ``check``, which says whether they are right for numbers as exact as these.
    """
    module = op.module("reference")
    if hasattr(module, "numbers"):
        of = functools.partial(reference_of, op, kwargs=kwargs, function="numbers", arithmetic=arithmetic)
        found = [(of(each, double=True)[0], of(each, double=False)[0]) for each in (args, *alike)]
        return float(module.check(name, got, found, args, kwargs))
    (exact, ref), *others = (
        [reference_of(op, each, kwargs, double=double, arithmetic=arithmetic) for double in (True, False)]
        for each in (args, *alike)
    )
    lucks = [[(r.double() - e).nan_to_num(0, 0, 0) for e, r in zip(*other, strict=True)] for other in others]
    names = [f"{name} {n}" for n in (*op.mutated, *op.outnames)]
    return max((_within(*each) for each in zip(names, got, exact, ref, *lucks, strict=True)), default=0.0)


def _within(name: str, got: torch.Tensor, exact: torch.Tensor, ref: torch.Tensor, *lucks: torch.Tensor) -> float:
    """``check`` by the reference, or by one off by one of ``lucks``; raises what the first one says."""
    try:
        return check(name, got, ref, exact)
    except AssertionError:
        for luck in lucks:
            unlucky = torch.where(ref.isfinite(), (exact + luck).to(ref.dtype), ref)
            with contextlib.suppress(AssertionError):
                return check(name, got, unlucky, exact)
        raise


def mutated(op: Op, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [args[op.argnames.index(n)] for n in op.mutated]


def unchanged(name: str, op: Op, before: list[Any], after: tuple[Any, ...]) -> None:
    for argument, old, new in zip(op.argnames, before, after, strict=False):
        if isinstance(old, torch.Tensor) and argument not in op.mutated:
            # A single element may have any stride, which a view as bytes would not take.
            a, b = (t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (old, new))
            if not torch.equal(a, b):
                raise AssertionError(f"{name}: the call changed its input {argument}")


def outcome(runner: Runner, case: Case, device: str, layout: str, schedule: int) -> float | str | None:
    """What ``run`` returns, or in words why the case failed, or None for one that the row refuses."""
    try:
        with runner.watching(schedule):
            return run(case, device, layout)
    except (AssertionError, UnsupportedError, RuntimeError) as error:
        return str(error) or type(error).__name__


@contextlib.contextmanager
def workers(jobs: int, begin: Callable[[], Any] | None = None) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` by ``jobs`` processes, each of which calls ``begin`` first; the usual ``map`` for one.

    Most of a case's time goes into its references, on the CPU.
    """
    if jobs == 1:
        yield map
        return
    pool = _Pool(jobs, begin)
    try:
        yield pool.map
    finally:
        pool.close()


class _Pool:
    """Processes that others replace after ``_CALLS`` calls each: a simulator keeps all that it has loaded.

    An executor's own ``max_tasks_per_child`` deadlocks in Python 3.11 to 3.14 (cpython issue 115634).
    """

    def __init__(self, jobs: int, begin: Callable[[], Any] | None):
        self.jobs, self.begin = jobs, begin
        self.executor: ProcessPoolExecutor | None = None
        self.left = 0  # calls of these processes together

    def map(self, function: Callable[..., Any], *columns: Iterable[Any]) -> Iterator[Any]:
        calls = list(zip(*columns, strict=True))
        while calls:
            executor = self.executor if self.executor and self.left else self._renewed()
            now, calls = calls[: self.left], calls[self.left :]
            self.left -= len(now)
            yield from executor.map(function, *zip(*now, strict=True), chunksize=4)

    def _renewed(self) -> ProcessPoolExecutor:
        self.close()
        # Not forked: neither the parent's threads nor its CUDA context live on in a child.
        self.executor = ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn"), _alone, (self.begin,))
        self.left = _CALLS * self.jobs
        return self.executor

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown()


def _alone(begin: Callable[[], Any] | None) -> None:
    torch.set_num_threads(1)
    if begin is not None:
        begin()
