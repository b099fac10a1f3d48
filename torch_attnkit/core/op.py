"""The table's two record types: what an op is (Op) and which kernels can run it (Kernel)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from .family import Launcher, solved_by
from .spec import DTYPES, Spec, parse, short
from .target import WHERE, Target

NAMESPACE = "attnkit"
_F32 = torch.finfo(torch.float32)
Predicate = Callable[["Call"], Any]


@dataclass(slots=True)
class Call:
    """One call with its names bound: axis sizes, arguments, the model dtype T, and the features it uses."""

    op: str
    dim: dict[str, int]
    arg: SimpleNamespace
    dtype: torch.dtype
    batch: tuple[int, ...]
    device: torch.device
    features: tuple[str, ...] = ()

    def sizes(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.dim.items())


def of_dtypes(need: Predicate) -> Predicate:
    """Mark a need of a row as one of what tensors hold, like a dtype: it tells the rows of an op apart."""
    need.of_dtypes = True  # type: ignore[attr-defined]
    return need


class Reason(NamedTuple):
    """What a call fails of a row: ``dtype``, an axis, ``features`` (``things`` of them) or one of its ``needs``."""

    what: str
    message: str
    things: int = 1


@dataclass(frozen=True)
class Kernel:
    """One row of the table: what it runs on, keys of ``WHERE``, what it accepts, and what takes its calls."""

    on: str
    dtypes: str
    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    features: str = ""
    needs: dict[str, Predicate] = field(default_factory=dict)  # reason for the refusal -> what must hold
    launcher: Launcher | None = None  # of a family; without one ``build`` of the op's own file, named as ``on``

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(arch for name in self.on.split() for arch in WHERE[name])

    def refusal(self, call: Call) -> str | None:
        """Why this row does not accept ``call``, the first reason, or None if it does."""
        return next((reason.message for reason in self.reasons(call)), None)

    def reasons(self, call: Call) -> Iterator[Reason]:
        """All that keeps this row from ``call``."""
        if short(call.dtype) not in (accepted := self.dtypes.split()):
            yield Reason("dtype", f"dtype {short(call.dtype)} not in {{{', '.join(accepted)}}}")
        for axis, allowed in self.dims.items():
            if call.dim[axis] not in allowed:
                yield Reason(axis, f"{axis}={call.dim[axis]} not in {{{', '.join(map(str, allowed))}}}")
        if missing := [f for f in call.features if f not in self.features.split()]:
            yield Reason("features", f"no support for: {', '.join(missing)}", len(missing))
        for why, ok in self.needs.items():
            if not ok(call):
                yield Reason("dtype" if hasattr(ok, "of_dtypes") else "needs", why)


@dataclass(frozen=True)
class Shards:
    """A way to share one call among processes: which axes are cut into equal parts, together.

    ``axes`` are names of ``dims``, ``...`` is each of the batch axes by itself; tensors without them are whole
    everywhere. Every process then has its part of each output that has one of the axes, and of the outputs in ``sums``
    a summand; what of the inputs would be added once by each process stands there too, and is divided among them.
    """

    axes: str
    needs: dict[str, Predicate] = field(default_factory=dict)  # in words -> what must hold
    sums: str = ""


@dataclass(frozen=True)
class Op:
    """An op as data. ``CONTRIBUTING.md`` explains the fields by example."""

    schema: str
    dims: dict[str, str]
    kernels: tuple[Kernel, ...] = ()
    meaning: dict[str, str] = field(default_factory=dict)  # argument or output -> what it is, a sentence each
    axes: dict[str, str] = field(default_factory=dict)  # axis -> what it counts
    where: dict[str, Predicate] = field(default_factory=dict)
    derive: dict[str, Callable[[Call], int]] = field(default_factory=dict)
    unless: dict[str, Predicate] = field(default_factory=dict)  # output -> when it is returned empty
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layouts: dict[str, Callable[[Call], str | None]] = field(default_factory=dict)  # tensor -> dims by the arguments
    features: dict[str, Predicate] = field(default_factory=dict)
    exclusive: tuple[tuple[str, ...], ...] = ()  # features of which a call has at most one
    shards: tuple[Shards, ...] = ()
    whole: str = ""  # why no axis can be cut, where ``shards`` is empty
    apart: str = ""  # on a CPU: the axis along which a batch is taken one by one where it must not decide on bits
    varies: dict[str, str] = field(
        default_factory=dict
    )  # what rows are on -> why bits depend on the batch (invariance)
    backward: str = ""  # the op of the gradients: takes those of the outputs before the arguments, gives the tensors'
    base: Op | None = None  # of a form that writes into given tensors (``into.py``): the op that returns them
    package: str = ""

    @cached_property
    def parsed(self) -> Any:
        return torch._C.parse_schema(f"{NAMESPACE}::{self.schema}")

    @cached_property
    def name(self) -> str:
        return self.schema.split("(")[0]

    @cached_property
    def argnames(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.parsed.arguments)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.parsed.arguments if "Tensor" in str(a.type))

    @cached_property
    def positional(self) -> int:
        return sum(not a.kwarg_only for a in self.parsed.arguments)

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.parsed.arguments if a.alias_info is not None and a.alias_info.is_write)

    @cached_property
    def outnames(self) -> tuple[str, ...]:
        return tuple(r.name for r in self.parsed.returns)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return {a.name: a.default_value for a in self.parsed.arguments if a.has_default_value()}

    def check_meaning(self) -> None:
        """Every argument and every output has its sentence. Raises ValueError for one without, or of another name."""
        names = {*self.argnames, *self.outnames}
        for name in (*self.argnames, *self.outnames, *self.meaning):
            if (name in names) != (name in self.meaning):
                found = f"has none for {name}" if name in names else f"has one for {name}, which the schema has not"
                raise ValueError(f"{self.name}: meaning {found}, accepted: a sentence for each argument and output")

    def spec(self, name: str, call: Call | None = None) -> Spec:
        return parse((self.layouts[name](call) if call and name in self.layouts else None) or self.dims[name])

    def module(self, file: str) -> ModuleType:
        """A file of the op's folder: ``reference``, ``cases``, ``problem``, or a row's own."""
        return importlib.import_module(f"{self.package}.{file}")

    def sources(self, row: Kernel) -> tuple[str, ...]:
        """The modules that take a row's calls: the launcher's and the op's problem, or the op's own file."""
        own = f"{self.package}.{'problem' if row.launcher else row.on}"
        return (row.launcher.module, own) if row.launcher else (own,)

    def entries(self, row: Kernel) -> tuple[str, ...]:
        """The same, of the launcher ``module:function``: what a row's evidence depends on."""
        first, *rest = self.sources(row)
        return (f"{first}:{row.launcher.function}" if row.launcher else first, *rest)

    def build(self, row: Kernel, call: Call, target: Target) -> Callable[..., None]:
        """What launches ``row``'s kernels, on the arguments and outputs of every call like ``call``."""
        if row.launcher is None:
            launch: Callable[..., None] = self.module(row.on).build(call, target)
            return launch
        problem = self.module("problem")
        return solved_by(row.launcher.of(self.name), problem.problem, problem.operands)(call, target)

    def bind(self, args: tuple[Any, ...], *, traced: bool = False) -> Call:
        """Name every axis, check shapes, dtypes, devices and rules, and find the features.

        ``traced``, for fake tensors, leaves what looks at symbolic sizes to the real call.
        """
        values, given = dict(zip(self.argnames, args, strict=True)), self.given(args)
        if self.base is not None:
            from . import into

            outs = len(self.mutated)
            call = self.base.bind(args[:-outs], traced=traced)
            into.check(self, call, args[-outs:], traced=traced)
            return call
        dtype = self._model_dtype(given, values.get("dtype"))
        first_name, first = given[0]
        call = Call(self.name, {}, SimpleNamespace(**values), dtype, (), first.device)
        owner: dict[str, str] = {}
        for name, tensor in given:
            self._check_dtype(name, tensor, dtype)
            if tensor.device != first.device:
                raise ValueError(f"{self.name}: {name} is on {tensor.device}, but {first_name} is on {first.device}")
            self._bind_shape(name, tensor, call, owner)
            if not traced and _apart(tensor) and not (steps(tensor) or self.spec(name).small):
                raise ValueError(
                    f"{self.name}: {name} must be contiguous in its last dimension, got strides "
                    f"{tuple(tensor.stride())} for shape {tuple(tensor.shape)}"
                )
        self._check_scalars(values)
        for axis, size in self.derive.items():
            call.dim[axis] = size(call)
        if not traced:
            for rule, ok in self.where.items():
                if not ok(call):
                    raise ValueError(f"{self.name}: {rule} (got {call.sizes()})")
            call.features = tuple(f for f, on in self.features.items() if on(call))
        return call

    def given(self, args: tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
        """The tensors among ``args``: all that must be there, each of them dense."""
        found = []
        for name, value in zip(self.argnames, args, strict=True):
            if name not in self.tensors or (value is None and self.defaults.get(name, ...) is None):
                continue
            if (kind := _kind(value)) != "strided":
                raise TypeError(f"{self.name}: {name} is {kind}, accepted: a dense (strided) tensor") from None
            found.append((name, value))
        return found

    def _model_dtype(self, given: list[tuple[str, torch.Tensor]], asked: torch.dtype | None) -> torch.dtype:
        """T: the dtype of the first tensor that can only be T, else of one that may be, else the one asked for."""
        specs = [(self.spec(n), t.dtype) for n, t in given]
        ranked = [((len(s.dtypes) > 1) + (d in s.explicit()), d) for s, d in specs if d in s.model()]
        return min(ranked, key=lambda r: r[0], default=(0, asked or torch.float32))[1]

    def _check_dtype(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        explicit, model = self.spec(name).explicit(), self.spec(name).model()
        if tensor.dtype in explicit or (tensor.dtype == dtype and dtype in model):
            return
        known = tensor.dtype in model  # a model dtype, but not this call's
        accepted = (*explicit, *((dtype,) if known else model))
        why = f" ({short(dtype)} is the dtype of this call's model tensors)" if known else ""
        message = ", ".join(dict.fromkeys(map(short, accepted)))
        raise TypeError(f"{self.name}: {name} is {short(tensor.dtype)}, accepted: {message}{why}")

    def _bind_shape(self, name: str, tensor: torch.Tensor, call: Call, owner: dict[str, str]) -> None:
        spec, shape = self.spec(name, call), tuple(tensor.shape)
        if spec.spread and not shape:
            return
        split = len(shape) - len(spec.axes)
        if split < 0 or (split and not spec.batch):
            raise ValueError(f"{self.name}: {name} must be {spec}, got shape {shape}")
        if spec.batch:
            if owner.setdefault("...", name) == name:
                call.batch = shape[:split]
            elif len(call.batch) != split or any(differ(a, b) for a, b in zip(call.batch, shape, strict=False)):
                raise ValueError(
                    f"{self.name}: {name} has batch axes {shape[:split]}, but {owner['...']} has {call.batch}"
                )
        for axis, size in zip(spec.axes, shape[split:], strict=True):
            value, other, key = axis.value(size), owner.setdefault(str(axis.name), name), str(axis.name)
            bound = call.dim.setdefault(key, value) if axis.name else 0  # a literal is a size of which nothing is left
            if differ(bound, value) or (isinstance(value, int) and value < 0):
                where = f": {key}={value}" if axis.name else ""
                where += f", but {other} has {key}={bound}" if axis.name and other != name else ""
                raise ValueError(f"{self.name}: {name} must be {spec}, got shape {shape}{where}")

    def _check_scalars(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, float) and not (value == 0 or _F32.tiny <= abs(value) <= _F32.max):
                accepted = f"a number that float32 holds, 0 or {_F32.tiny:.3g} to {_F32.max:.3g} in magnitude"
                raise ValueError(f"{self.name}: {name} is {value}, accepted: {accepted}")
            if name in self.choices and value not in self.choices[name]:
                raise ValueError(f"{self.name}: {name} is {value!r}, accepted: {', '.join(self.choices[name])}")

    def outputs(self, call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every output, in the schema's order."""
        found = []
        for name in self.outnames:
            spec = self.spec(name, call)
            dtype = (call.arg.dtype if spec.dtypes[0] == "@dtype" else None) or DTYPES.get(spec.dtypes[0], call.dtype)
            shape = (call.batch if spec.batch else ()) + tuple(a.size(call.dim) for a in spec.axes)
            found.append(((0,) if name in self.unless and self.unless[name](call) else shape, dtype))
        return found


def _kind(value: torch.Tensor | None) -> str:
    if value is None or value.is_nested or value.is_quantized:
        return "None" if value is None else "nested" if value.is_nested else "quantized"
    return str(value.layout).removeprefix("torch.")


def _apart(tensor: torch.Tensor) -> bool:
    """Whether there are gaps between the elements of the last axis."""
    return bool(tensor.dim()) and tensor.stride(-1) != 1 and tensor.size(-1) > 1


def steps(value: Any) -> bool:
    """Whether this is an index tensor of one or two axes with gaps, such as a column of a table of token ids.

    These are small: references read them as they are, and kernels get a copy, as of all that ``Spec.small`` names.
    """
    index = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
    return index and value.dim() <= 2 and _apart(value)


def differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known to differ; a symbolic size is left to the real call."""
    return isinstance(a, int) and isinstance(b, int) and a != b
