"""From ``torch.ops.attnkit.<op>(...)`` to a running kernel: registration, the plan cache, and the choice of a row.

A call is planned once per signature (shapes, strides, dtypes, device, scalars) and ``setting``. The function that torch
calls only looks the plan up; it is generated from the schema, since a loop over arguments costs more than all the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from . import apart, into, invariance, native
from .errors import UnsupportedError
from .memory import empty, on_cpu
from .numerics import exact
from .op import NAMESPACE, Call, Kernel, Op, Reason, steps
from .spec import DTYPES, short
from .target import SIMULATED, WHERE, Target, setting, target_of

OPS: dict[str, Op] = {}
FORMS: dict[str, Op] = {}  # of OPS, those that write into given tensors (``into.py``), by names of their own
PLAN_KEYS: dict[str, Callable[..., Any]] = {}
_PLANS: dict[str, native.Plans] = {}
_ACCEPTED = re.compile(r" not in \{(.*?)\}")  # the words of ``Kernel.refusal`` about a dtype or a size
_MAX_PLANS = 4096  # per op; a signature per sequence length would grow without bound
_DEVICES = ("CPU", "CUDA", "MPS")
# Where torch sends tensors that are not dense in inference mode, which goes past the Autograd key.
_NOT_DENSE = ("MkldnnCPU",) + tuple(
    f"{kind}{device}" for kind in ("Sparse", "SparseCsr", "NestedTensor", "Quantized") for device in ("CPU", "CUDA")
)


def _keys(device: str) -> int:
    """The key set of a call on ``device`` where nothing lies between the Autograd key and the backend."""
    backend, autograd = (getattr(torch._C.DispatchKey, key) for key in (device, f"Autograd{device}"))
    found: int = (torch._C.DispatchKeySet(backend) | torch._C.DispatchKeySet(autograd)).raw_repr()
    return found


_PLAIN = {_keys(device) for device in _DEVICES}
allocate: Callable[..., torch.Tensor] = empty  # parity replaces it to poison and fence outputs


class Plan(NamedTuple):
    """What one signature resolved to: the callable, a word for what it runs on, and on the CPU a kernel that is all of
    it (``native.ready``)."""

    launch: Callable[..., Any]
    where: str
    ready: Any = None


def resolve(op: Op, call: Call, target: Target) -> Kernel | None:
    """The first row that accepts ``call``; None on a plain CPU tensor without a row: the reference runs."""
    why = next((word for on, word in op.varies.items() if target.arch in WHERE[on]), None)
    if why and invariance.is_on():
        raise UnsupportedError(f"{op.name} on {target}: {why}; outside of batch_invariant() it runs")
    rows = [row for row in op.kernels if target.arch in row.archs]
    found = next((row for row in rows if row.refusal(call) is None), None)
    if found is not None or target.arch == "cpu":
        return found
    have = [arch for arch in SIMULATED if any(arch in row.archs for row in op.kernels)]
    message = unique(_nearest(op, rows, call)) if rows else [
        f"no kernel yet (there are kernels for: {', '.join(have) or 'no device'})"
    ]  # fmt: skip
    raise UnsupportedError(f"{op.name} on {target}: {'; '.join(message)}")


def _nearest(op: Op, rows: list[Kernel], call: Call) -> Iterator[str]:
    """What the rows say of which the call fails least: the fewest things; of as many rather a need than a feature, and
    a size than a dtype, for a row with the call's dtype, sizes and features is the one that was meant."""

    def far(reasons: list[Reason]) -> tuple[int, ...]:
        # An axis of no tensor says what tensors hold (the bits of an element of the caches), as a dtype does.
        kinds = ["dtype" if r.what in op.derive else "sizes" if r.what in call.dim else r.what for r in reasons]
        each = [
            sum(r.things for r, kind in zip(reasons, kinds, strict=True) if kind == wanted)
            for wanted in ("dtype", "sizes", "features", "needs")
        ]
        return (sum(each), *each)

    found = [(far(reasons), row.on, reasons) for row in rows if (reasons := list(row.reasons(call)))]
    least = min(distance for distance, _, _ in found)
    return (f"{on}: {' and '.join(r.message for r in reasons)}" for distance, on, reasons in found if distance == least)


def unique(answers: Iterable[str]) -> list[str]:
    """The reasons of rows without repeats: those that differ in the accepted sizes of one axis alone become one."""
    groups: dict[str, list[dict[str, None]]] = {}  # an answer without the values that it accepts -> these, by place
    for answer in answers:
        named = _ACCEPTED.findall(answer)
        known = groups.setdefault(_ACCEPTED.sub(" not in {}", answer), [{} for _ in named])
        for values, more in zip(known, named, strict=True):
            values |= dict.fromkeys(more.split(", "))
    return [_filled(message, each) for message, each in groups.items()]


def _filled(message: str, each: list[dict[str, None]]) -> str:
    values = iter(each)
    return re.sub(r" not in \{\}", lambda _: f" not in {{{', '.join(next(values))}}}", message)


def _returned(outs: list[torch.Tensor]) -> Any:
    return tuple(outs) if len(outs) > 1 else outs[0] if outs else None


def _reference(op: Op, call: Call) -> Callable[..., Any]:
    """The oracle as it stands; in float64 it keeps float64 where ``dims`` promises float32, so there it is rounded."""
    reference: Callable[..., Any] = exact(op.module("reference").reference)
    dtypes = [dtype for _, dtype in op.outputs(call)]
    if call.dtype != torch.float64 or not dtypes:
        return reference

    def rounded(*args: Any) -> Any:
        outs = reference(*args)
        return _returned([o.to(d) for o, d in zip((outs,) if len(dtypes) == 1 else outs, dtypes, strict=True)])

    return rounded


Made = dict[int, Callable[[torch.Tensor], torch.Tensor]]  # an argument's place -> what makes it what is read


def made(op: Op, call: Call, *, whole: bool) -> Made:
    """How small tensors become what is read, on their device: one number is spread over its axes, and for kernels,
    which read ``whole`` tensors of one dtype, others are cast and what has steps between its elements is packed."""
    found: Made = {}
    for i, name in enumerate(op.argnames):
        tensor = getattr(call.arg, name)
        if name not in op.tensors or tensor is None:
            continue
        spec = op.spec(name)
        one = spec.spread and not tensor.dim()
        cast = short(tensor.dtype) in spec.cast
        if one or (whole and (cast or steps(tensor) or (spec.small and not tensor.is_contiguous()))):
            size = [axis.size(call.dim) for axis in spec.axes] if one else tensor.shape
            dtype = DTYPES[spec.dtypes[0]] if cast and whole else tensor.dtype
            found[i] = functools.partial(_made_of, size, dtype, whole)
    return found


def _made_of(size: Sequence[int], dtype: torch.dtype, whole: bool, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.expand(size)
    return tensor.to(dtype).contiguous() if whole else tensor


def read(made: Made, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` as they are read."""
    return tuple(made[i](a) if i in made else a for i, a in enumerate(args))


def build(op: Op, call: Call, target: Target) -> Callable[..., None]:
    """What launches the kernels of the row that takes ``call`` on a device, or simulated."""
    row = resolve(op, call, target)
    assert row is not None, "only a CPU has calls without a row"
    return _built(op, row, call, target, made(op, call, whole=True))


def _built(op: Op, row: Kernel, call: Call, target: Target, small: Made) -> Callable[..., None]:
    """The launch of ``row`` on what is read of the arguments of calls like ``call``."""
    found = op.bind(read(small, tuple(vars(call.arg).values()))) if small else call
    return op.build(row, _described(found), target)


def _described(call: Call) -> Call:
    """``call`` with meta tensors for its tensors: shapes, strides and dtypes without memory.

    A plan outlives its call: whatever a kernel's ``build`` keeps of it, it keeps no memory of the caller's.
    """
    meta = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for name, value in vars(call.arg).items()
        if isinstance(value, torch.Tensor)
    }
    return dataclasses.replace(call, arg=SimpleNamespace(**vars(call.arg) | meta))


def make_plan(op: Op, args: tuple[Any, ...]) -> Plan:
    """Validate ``args`` and build what runs for every call of the same signature."""
    call = op.bind(args)
    if op.base is not None:
        return _plan_into(op, op.base, call)
    target = target_of(call.device)
    if apart.counts(op, call, target):
        return Plan(apart.one_at_a_time(op, call, lambda part: make_plan(op, part).launch), "cpu, one at a time")
    row = resolve(op, call, target)
    # Strides and dtypes are part of the signature, so that calls without such tensors do not look for them.
    small = made(op, call, whole=row is not None)
    if row is None:
        reference = _reference(op, call)
        return Plan((lambda *args: reference(*read(small, args))) if small else reference, "reference")
    launch = _built(op, row, call, target, small)
    ready = None if small else getattr(launch, "ready", None)
    launch = exact(launch) if target.arch == "cpu" else launch
    outputs, device = op.outputs(call), call.device
    quick = on_cpu(outputs) if target.arch == "cpu" else None

    def run(*args: Any) -> Any:
        if quick is not None and allocate is empty:
            outs = quick()
        else:
            outs = [allocate(shape, dtype=dtype, device=device) for shape, dtype in outputs]
        launch(*args, *outs)
        return _returned(outs)

    return Plan((lambda *args: run(*read(small, args))) if small else run, str(target), ready)


def _plan_into(op: Op, base: Op, call: Call) -> Plan:
    """What runs for a form of ``base`` that writes into given tensors (``into.py``), the last arguments of a call."""
    target, count = target_of(call.device), len(op.mutated)
    row = resolve(base, call, target)
    small = made(base, call, whole=row is not None)
    separate = apart.counts(base, call, target)
    if row is None or separate:
        reference = make_plan(base, tuple(vars(call.arg).values())).launch if separate else _reference(base, call)

        def launch(*args: Any) -> None:
            results = reference(*args[:-count])
            for out, result in zip(args[-count:], results if count > 1 else (results,), strict=True):
                out.copy_(result)
    else:
        launch = _built(base, row, call, target, small)
        launch = exact(launch) if target.arch == "cpu" else launch

    def run(*args: Any) -> None:
        into.check_memory(op, args[:-count], args[-count:])
        launch(*(read(small, args) if small else args))

    return Plan(run, "reference" if row is None else str(target))


class Entries(NamedTuple):
    """The generated functions of an op: by dispatch key, the plan key alone, and what C++ asks, for the CPU and for
    devices: (key of a call, run by its plan), which take arguments by position."""

    by_key: dict[str, Callable[..., Any]]
    plan_key: Callable[..., Any]
    asked: dict[str, tuple[Callable[..., Any], Callable[..., Any]]]


def _source(op: Op) -> str:
    """What ``_compile`` compiles: for the CPU, for devices, and for the Autograd key of each."""
    optional = {n for n in op.tensors if op.defaults.get(n, ...) is None}  # the tensors that may be None

    def facts(name: str, device: bool) -> str:  # what of an argument belongs to the signature
        if name not in op.tensors:
            return name
        layout = f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype"
        layout += f", {name}.get_device()" if device else ""
        return f"None if {name} is None else ({layout})" if name in optional else layout

    params = [f"{n}=d_{n}" if n in op.defaults else n for n in op.argnames]
    if op.positional < len(params):
        params.insert(op.positional, "*")
    given, args = ", ".join(params), ", ".join(op.argnames)
    grads = " or ".join(
        f"({n} is not None and {n}.requires_grad)" if n in optional else f"{n}.requires_grad" for n in op.tensors
    )
    # torch sends a call to the CPU's functions only if every tensor is there, so that no device needs to be asked for.
    keys = {
        name: f"(setting(), {', '.join(facts(n, name == 'device') for n in op.argnames)})" for name in ("cpu", "device")
    }
    # None for a tensor that must be there is the only way to an AttributeError.
    missing = f"    except AttributeError:\n        given(({args},))\n        raise\n"
    launch = f"    return (plans.get(_key) or miss(_key, ({args},))).launch({args})\n"
    bumps = "".join(f"    bump({n})\n" for n in op.mutated)
    source = f"""
def plan_key({given}):
    return {keys["cpu"]} if {op.tensors[0]}.is_cpu else {keys["device"]}

def autograd({given}):
    return below(({args},))
"""
    for name, key in keys.items():
        source += f"""
def {name}({given}):
    try:
        _key = {key}
{missing}{launch}

def {name}_autograd(_keys, {given}):
    try:
        if _keys.raw_repr() not in plain or fwd._current_level >= 0 or (grad_enabled() and ({grads})):
            return below(({args},))
        _key = {key}
{missing}{bumps}{launch}
def {name}_key({args}):
    return {key}

def {name}_run({args}):
    try:
        _key = {key}
{missing}{launch}"""
    return source


def _compile(op: Op) -> Entries:
    """The functions that torch calls. Those of the Autograd key go straight on only if nothing lies between it and the
    backend, which their key set tells: no subclass, no mode, no functorch transform, no negated view, no gradient."""
    plans = _PLANS.setdefault(op.name, native.Plans())

    def miss(key: Any, args: tuple[Any, ...]) -> Plan:
        plan = make_plan(op, args)
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plans[key] = plan
        return plan

    below = functools.partial(_below_autograd, op)
    scope: dict[str, Any] = {f"d_{n}": v for n, v in op.defaults.items()} | dict(
        plans=plans, miss=miss, plain=_PLAIN, setting=setting, bump=_bump_version, given=op.given,
        fwd=forward_ad, grad_enabled=torch.is_grad_enabled, below=below,
    )  # fmt: skip
    exec(compile(_source(op), f"<attnkit.{op.name}>", "exec"), scope)
    by_key = {d: scope["cpu" if d == "CPU" else "device"] for d in _DEVICES}
    by_key["Autograd"] = scope["autograd"]  # of what is not on one of these devices
    by_key |= {f"Autograd{d}": scope["cpu_autograd" if d == "CPU" else "device_autograd"] for d in _DEVICES}
    asked = {name: (scope[f"{name}_key"], scope[f"{name}_run"]) for name in ("cpu", "device")}
    return Entries(by_key, scope["plan_key"], asked)


UNREPEATED: dict[str, str] = {}  # why calls of an op stayed in Python, the last reason


def native_devices(op: Op) -> list[str]:
    """The devices whose calls C++ may repeat: on the CPU those of an op with a row there."""
    if native.extension is None:
        return []
    return ["CUDA", "CPU"] if any("cpu" in row.archs for row in op.kernels) else ["CUDA"]


def register_native(op: Op, space: str, device: str, entries: Entries, *, host: bool = False) -> None:
    """Let C++ run the calls of ``space``'s op of this name on a device: at its key and at its Autograd key.

    With ``host`` it repeats kernels of the CPU, and leaves what is simulated to Python. Tests do without.
    """
    assert native.extension is not None
    key_of, direct = entries.asked["cpu" if device == "CPU" else "device"]
    plans = _PLANS[op.name]

    def missed(*args: Any) -> tuple[Any, Any]:
        """The result of a call that C++ does not know, and what repeats it, None to be asked again, or False."""
        plan = plans.get(key_of(*args)) if allocate is empty else None
        if plan is None:
            return direct(*args), None
        if host:
            result = plan.launch(*args)
            return result, plan.ready is not None and (plan.ready, result if isinstance(result, tuple) else (result,))
        if plan.where in ("reference", "cpu"):
            return plan.launch(*args), False
        result, recipe, why = native.recorder().record(plan.launch, args)
        if why:
            UNREPEATED[op.name] = why
        return result, recipe

    native.extension.register(
        space, op.name, device, _keys(device), host, _MAX_PLANS, direct, lambda *args: _below_autograd(op, args),
        missed, setting, lambda device: native.recorder().room(device),
    )  # fmt: skip
    plans.repeated.append((f"{space}::{op.name}", device))


def _bump_version(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():  # inference tensors have no version counter
        torch.autograd.graph.increment_version(tensor)


class _ForwardOnly(torch.autograd.Function):
    """Runs an op below Autograd and refuses the backward: gradients never flow through a reference unnoticed."""

    @staticmethod
    def forward(ctx: Any, name: str, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.op = name
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.attnkit, name).default(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = zip(OPS[ctx.op].argnames, ctx.needs_input_grad[2:], strict=False)
        names = ", ".join(name for name, needed in tensors if needed)
        raise NotImplementedError(
            f"{ctx.op} has no backward, and a gradient of {names} is asked for; call it under torch.no_grad() or "
            "torch.inference_mode(), or detach these; to train, compute this step with PyTorch's own operators"
        )


class _Differentiable(torch.autograd.Function):
    """Runs an op below Autograd, and in the backward the op that the table names for it, of which there is no other."""

    @staticmethod
    def forward(ctx: Any, op: Op, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.op, ctx.kwargs = op, kwargs
        ctx.save_for_backward(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.attnkit, op.name).default(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dense = (g if g.stride(-1) == 1 else g.contiguous() for g in grads)  # a sum's gradient is one number, expanded
        found = getattr(torch.ops.attnkit, ctx.op.backward).default(*dense, *ctx.saved_tensors, **ctx.kwargs)
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *(g if needed else None for g, needed in zip(found, wanted, strict=True)))


def _below_autograd(op: Op, values: tuple[Any, ...]) -> Any:
    """The general path of the Autograd key: tracing, subclasses, modes, views, and inputs that have a gradient."""
    given = op.given(values)
    for name, tensor in given:
        if name in op.mutated and tensor.is_neg():
            raise ValueError(f"{op.name}: {name} is a negated view, accepted: a tensor whose memory holds its values")
    args, kwargs = values[: op.positional], dict(list(zip(op.argnames, values, strict=True))[op.positional :])
    if _differentiated(op, given):
        if op.backward:
            return _Differentiable.apply(op, kwargs, *args)
        return _ForwardOnly.apply(op.name, kwargs, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.attnkit, op.name).default(*args, **kwargs)


def _differentiated(op: Op, given: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether a backward may ask for a gradient. Raises where it, or a tangent, is lost unless the call is refused."""
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        for name, tensor in given:
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(
                    f"{op.name}: {name} has a tangent, but the op has no forward derivative; give it {name}.detach()"
                )
    grads = [n for n, tensor in given if tensor.requires_grad] if torch.is_grad_enabled() else []
    # Transforms such as torch.func.grad know no function whose backward raises.
    transformed = torch._C._are_functorch_transforms_active()
    if grads and (op.mutated or transformed):
        why = "writes in place and has no backward" if op.mutated else "has no backward"
        if op.backward:
            why = "has a backward for torch.autograd alone, not for transforms of torch.func"
        raise NotImplementedError(
            f"{op.name}: {grads[0]} requires a gradient, but the op {why}; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    return bool(grads)


def _values(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args + tuple(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :])


def _fake(op: Op) -> Callable[..., Any]:
    """For fake tensors and for those on the meta device, of which all is known but their contents."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = _values(op, args, kwargs)
        given = op.given(values)
        call = op.bind(values, traced=any(type(t) not in (torch.Tensor, torch.nn.Parameter) for _, t in given))
        return _returned([given[0][1].new_empty(shape, dtype=dtype) for shape, dtype in op.outputs(call)])

    return fake


def _refuse(op: Op) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        op.given(_values(op, args, kwargs))
        raise AssertionError(f"{op.name}: dense tensors were sent where the others go")

    return refuse


def load(package: str) -> torch.library.Library:
    """Define every op found by listing ``package`` and register it for CPU, CUDA, MPS, Autograd and fake tensors."""
    lib = torch.library.Library(NAMESPACE, "DEF")
    for name in sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)):
        found: Op = importlib.import_module(f"{package}.{name}.op").OP
        op = dataclasses.replace(found, package=f"{package}.{name}")
        if op.name != name:
            raise ValueError(f"folder {name} must define op {name}, defines {op.name}")
        op.check_meaning()
        OPS[name] = op
        _register(lib, op)
        if (form := into.form_of(op)) is not None:
            FORMS[form.name] = form
            _register(lib, form)
    return lib


def _register(lib: torch.library.Library, op: Op) -> None:
    lib.define(op.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    entries = _compile(op)
    name = op.name
    PLAN_KEYS[name] = entries.plan_key
    by_cpp = native_devices(op)
    for key, function in entries.by_key.items():
        if key.removeprefix("Autograd") in by_cpp:
            continue
        lib.impl(name, function, key, with_keyset=key.startswith("Autograd") and key != "Autograd")
    for key in _NOT_DENSE:
        lib.impl(name, _refuse(op), key)
    for device in by_cpp:
        register_native(op, NAMESPACE, device, entries, host=device == "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(op), lib=lib)
    native.quicken(NAMESPACE, name)


def plan_of(name: str, *args: Any, **kwargs: Any) -> Plan | None:
    """The cached plan of a call that has run, for those who want to know what ran."""
    return _PLANS[name].get(PLAN_KEYS[name](*args, **kwargs))
