"""Do the kernels compute what their reference defines? Every row of the table, on hardware or in a simulator.

The cases come from the table: row x dtype x dims x features x the shapes of the op's ``cases.py``. A case calls the
op as a user would, with outputs poisoned and fenced by guard bands and inputs embedded in poisoned buffers, and
compares with the reference run in float64 (``oracle/compare.py``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core import UnsupportedError, dispatch, simulate
from torch_attnkit.core.op import Call, Op
from torch_attnkit.core.spec import DTYPES
from torch_attnkit.oracle.attention import narrow_products
from torch_attnkit.oracle.compare import check

LAYOUTS = ("contiguous", "embedded")
_GUARD = 256  # elements on either side of an output


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


def reference_of(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], *, double: bool) -> tuple[torch.Tensor, ...]:
    """What the call writes in place and returns, by the reference; ``double`` runs it on the same numbers in float64.

    In float64 are the model tensors, and what is returned in a chosen dtype. A tensor that is float32 by contract stays
    what it is: it holds the same numbers.
    """

    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.double() if double and value.dtype in op.spec(name).model() else value.clone()

    copies = [convert(name, value) for name, value in zip(op.argnames, args, strict=False)]
    if double and "dtype" in op.argnames:
        kwargs = kwargs | {"dtype": torch.float64}
    with contextlib.nullcontext() if double else narrow_products():
        out = op.module("reference").reference(*copies, **kwargs)
    mutated = [copies[op.argnames.index(n)] for n in op.mutated]
    return (*mutated, *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out))


def run(case: Case, device: str = "cpu", layout: str = "contiguous") -> float:
    """Run one case; raises AssertionError if it is wrong. Returns the largest error as a fraction of its tolerance.

    A case that the row's ``needs`` exclude is not the row's to run.
    """
    op = dispatch.OPS[case.op]
    args, kwargs = inputs(op, case.shape, DTYPES[case.dtype], case.features, case.dims)
    if op.kernels[case.row].refusal(bound(op, args, kwargs)) in op.kernels[case.row].needs:
        return 0.0
    moved = tuple(_place(a, device, layout) if isinstance(a, torch.Tensor) else a for a in args)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in moved]
    with contextlib.ExitStack() as stack:
        if device == "cpu" and case.arch != "cpu":
            stack.enter_context(simulate(case.arch))
        fences = stack.enter_context(guarded_outputs())
        out = getattr(torch.ops.attnkit, case.op)(*moved, **kwargs)
        plan = dispatch.plan_of(case.op, *moved, **kwargs)
    if plan is None or not plan.where.startswith(case.arch):
        raise AssertionError(f"{case.id} ran on {plan and plan.where}")
    for fence in fences:
        fence.check(case.id)
    got = [*_mutated(op, moved), *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out)]
    _unchanged(case.id, op, before, moved)
    ref, ref64 = (reference_of(op, args, kwargs, double=d) for d in (False, True))
    names = [*op.mutated, *op.outnames]
    return max(
        (check(f"{case.id} {n}", g, r, r64) for n, g, r, r64 in zip(names, got, ref, ref64, strict=True)),
        default=0.0,
    )


def outcome(case: Case, device: str, layout: str) -> float | str:
    """What ``run`` returns, or in words why the case failed."""
    try:
        return run(case, device, layout)
    except (AssertionError, UnsupportedError, RuntimeError) as error:
        return str(error) or type(error).__name__


@contextlib.contextmanager
def workers(jobs: int, begin: Callable[[], Any]) -> Iterator[Callable[..., Iterator[float | str]]]:
    """A ``map`` over cases by ``jobs`` processes, each of which calls ``begin`` first; the usual ``map`` for one.

    Most of a case's time goes into its references, on the CPU.
    """
    if jobs == 1:
        yield map
        return
    # Not forked: neither the parent's threads nor its CUDA context live on in a child.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _alone, (begin,)) as pool:
        yield functools.partial(pool.map, chunksize=4)


def _alone(begin: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    begin()


def _mutated(op: Op, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [args[op.argnames.index(n)] for n in op.mutated]


def _unchanged(name: str, op: Op, before: list[Any], after: tuple[Any, ...]) -> None:
    for argument, old, new in zip(op.argnames, before, after, strict=False):
        if isinstance(old, torch.Tensor) and argument not in op.mutated:
            # A single element may have any stride, which a view as bytes would not take.
            a, b = (t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (old, new))
            if not torch.equal(a, b):
                raise AssertionError(f"{name}: the call changed its input {argument}")


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor whose values are wrong wherever they surface: nan, or a value no index or code should have."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    byte = 0xFF if dtype.is_floating_point else 0xA5  # the former is nan in every 8-bit float
    return (
        torch.full(shape, byte, dtype=torch.uint8, device=device).view(dtype)
        if dtype.itemsize == 1
        else torch.full(shape, -77, dtype=dtype, device=device)
    )


def _place(tensor: torch.Tensor, device: str, layout: str) -> torch.Tensor:
    """``tensor`` on the device; ``embedded``: as a strided view inside a poisoned buffer."""
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor.to(device).clone()
    room = tuple(s + 2 for s in tensor.shape[:-1]) + (tensor.shape[-1] + 32,)
    buffer = poison(room, tensor.dtype, device)
    view = buffer[tuple(slice(1, 1 + s) for s in tensor.shape[:-1]) + (slice(16, 16 + tensor.shape[-1]),)]
    return view.copy_(tensor)


@dataclass
class Fence:
    """The buffer around one output, and what its borders must still hold."""

    buffer: torch.Tensor
    size: int
    before: torch.Tensor

    def check(self, name: str) -> None:
        now = self.buffer.view(torch.uint8)
        edge = _GUARD * self.buffer.element_size()
        inner = self.size * self.buffer.element_size()
        for side, part in (("before", slice(0, edge)), ("after", slice(edge + inner, None))):
            if not torch.equal(now[part], self.before[part]):
                raise AssertionError(f"{name}: wrote {side} the {self.size} elements of an output")


@contextlib.contextmanager
def guarded_outputs() -> Iterator[list[Fence]]:
    """Every output that an op allocates inside this block is poisoned and fenced."""
    fences: list[Fence] = []
    original = dispatch.allocate

    def allocate(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = 1
        for s in shape:
            size *= s
        buffer = poison((size + 2 * _GUARD,), dtype, device)
        fences.append(Fence(buffer, size, buffer.view(torch.uint8).clone()))
        return buffer[_GUARD : _GUARD + size].view(shape)

    dispatch.allocate = allocate
    try:
        yield fences
    finally:
        dispatch.allocate = original
