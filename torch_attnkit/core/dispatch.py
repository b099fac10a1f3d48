"""From ``torch.ops.attnkit.<op>(...)`` to a running kernel: registration, the plan cache, and the choice of a row.

A call is planned once per signature (shapes, strides, dtypes, device, scalars, simulated arch). The function that torch
calls only looks the plan up; it is generated from the schema, since a loop over arguments costs more than all the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..memory import empty
from .errors import UnsupportedError
from .op import NAMESPACE, Call, Kernel, Op
from .target import Target, simulated_arch, target_of

OPS: dict[str, Op] = {}
PLAN_KEYS: dict[str, Callable[..., Any]] = {}
_PLANS: dict[str, dict[Any, Plan]] = {}
_MAX_PLANS = 4096  # per op; a signature per sequence length would grow without bound
_PLAIN = {torch.Tensor, torch.nn.Parameter}
allocate: Callable[..., torch.Tensor] = empty  # parity replaces it to poison and fence outputs


class Plan(NamedTuple):
    """What one signature resolved to: the callable, and a word for what it runs on."""

    launch: Callable[..., Any]
    where: str


def resolve(op: Op, call: Call, target: Target) -> Kernel | None:
    """The first row that accepts ``call``; None on a plain CPU tensor without a row: the reference runs."""
    reasons = []
    for row in op.kernels:
        if target.arch in row.archs:
            why = row.refusal(call)
            if why is None:
                return row
            reasons.append(f"{row.file}: {why}")
    if target.arch == "cpu":
        return None
    have = sorted({arch for row in op.kernels for arch in row.archs} - {"cpu"})
    reasons = reasons or [f"no kernel yet (there are kernels for: {', '.join(have) or 'no device'})"]
    raise UnsupportedError(f"{op.name} on {target}: {'; '.join(reasons)}")


def _returned(outs: list[torch.Tensor]) -> Any:
    return tuple(outs) if len(outs) > 1 else outs[0] if outs else None


def _reference(op: Op, call: Call) -> Callable[..., Any]:
    """The oracle as it stands; in float64 it keeps float64 where ``dims`` promises float32, so there it is rounded."""
    reference: Callable[..., Any] = op.module("reference").reference
    dtypes = [dtype for _, dtype in op.outputs(call)]
    if call.dtype != torch.float64 or not dtypes:
        return reference

    def rounded(*args: Any) -> Any:
        outs = reference(*args)
        return _returned([o.to(d) for o, d in zip((outs,) if len(dtypes) == 1 else outs, dtypes, strict=True)])

    return rounded


def make_plan(op: Op, args: tuple[Any, ...]) -> Plan:
    """Validate ``args`` and build what runs for every call of the same signature."""
    call = op.bind(args)
    target = target_of(call.device)
    row = resolve(op, call, target)
    if row is None:
        return Plan(_reference(op, call), "reference")
    launch = op.module(row.file).build(call, target)
    outputs, device = op.outputs(call), call.device

    def run(*args: Any) -> Any:
        outs = [allocate(shape, dtype=dtype, device=device) for shape, dtype in outputs]
        launch(*args, *outs)
        return _returned(outs)

    return Plan(run, str(target))


def _compile(op: Op) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The op's three functions: for backend keys, for the Autograd key, and the plan key alone."""
    optional = {n for n in op.tensors if op.defaults.get(n, ...) is None}  # the tensors that may be None

    def each(test: str) -> str:  # ``test`` holds for every tensor that is there
        return " and ".join(
            f"({n} is None or {test.format(n)})" if n in optional else test.format(n) for n in op.tensors
        )

    def facts(name: str) -> str:  # what of an argument belongs to the signature
        if name not in op.tensors:
            return name
        layout = f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype, {name}.get_device()"
        return f"None if {name} is None else ({layout})" if name in optional else layout

    params = [f"{n}=d_{n}" if n in op.defaults else n for n in op.argnames]
    if op.positional < len(params):
        params.insert(op.positional, "*")
    args = ", ".join(op.argnames)
    # get_device() is -1 for every device without an index, so the first tensor also tells its kind.
    key = f"({op.tensors[0]}.is_cpu, simulated_arch(), {', '.join(map(facts, op.argnames))})"
    # The Autograd key goes straight on only if nothing lies between it and the backend: no subclass, no dispatch mode,
    # no functorch transform, no gradient. It bumps versions as autograd does for what is written in place.
    source = f"""
def run({", ".join(params)}):
    key = {key}
    return (plans.get(key) or miss(key, ({args},))).launch({args})

def autograd({", ".join(params)}):
    if not ({each("type({}) in plain")} and not modes() and peek() is None
            and (not grad_enabled() or ({each("not {}.requires_grad")}))):
        return below(({args},))
    {"".join(f"bump({n}); " for n in op.mutated)}key = {key}
    return (plans.get(key) or miss(key, ({args},))).launch({args})

def plan_key({", ".join(params)}):
    return {key}
"""
    plans = _PLANS.setdefault(op.name, {})

    def miss(key: Any, args: tuple[Any, ...]) -> Plan:
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plan = plans[key] = make_plan(op, args)
        return plan

    scope: dict[str, Any] = {f"d_{n}": v for n, v in op.defaults.items()} | dict(
        plans=plans, miss=miss, plain=_PLAIN, simulated_arch=simulated_arch, bump=_bump_version,
        modes=torch._C._len_torch_dispatch_stack, peek=torch._C._functorch.peek_interpreter_stack,
        grad_enabled=torch.is_grad_enabled, below=functools.partial(_below_autograd, op),
    )  # fmt: skip
    exec(compile(source, f"<attnkit.{op.name}>", "exec"), scope)
    return scope["run"], scope["autograd"], scope["plan_key"]


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
        raise NotImplementedError(f"{ctx.op} has no backward; call it under torch.no_grad() or torch.inference_mode()")


def _below_autograd(op: Op, values: tuple[Any, ...]) -> Any:
    """The general path of the Autograd key: tracing, subclasses, modes, and inputs that require a gradient."""
    args, kwargs = values[: op.positional], dict(list(zip(op.argnames, values, strict=True))[op.positional :])
    grads = [n for n, v in zip(op.tensors, values, strict=False) if v is not None and v.requires_grad]
    if grads and torch.is_grad_enabled():
        if not op.mutated:
            return _ForwardOnly.apply(op.name, kwargs, *args)
        raise NotImplementedError(
            f"{op.name}: {grads[0]} requires a gradient, but the op writes in place and has no backward; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.attnkit, op.name).default(*args, **kwargs)


def _fake(op: Op) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        values = tuple(args) + tuple(kwargs.get(n, op.defaults.get(n)) for n in op.argnames[len(args) :])
        call = op.bind(values, traced=True)
        return _returned([args[0].new_empty(shape, dtype=dtype) for shape, dtype in op.outputs(call)])

    return fake


def load(package: str) -> torch.library.Library:
    """Define every op found by listing ``package`` and register it for CPU, CUDA, MPS, Autograd and fake tensors."""
    lib = torch.library.Library(NAMESPACE, "DEF")
    for name in sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)):
        found: Op = importlib.import_module(f"{package}.{name}.op").OP
        op = dataclasses.replace(found, package=f"{package}.{name}")
        if op.name != name:
            raise ValueError(f"folder {name} must define op {name}, defines {op.name}")
        lib.define(op.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        run, autograd, PLAN_KEYS[name] = _compile(op)
        for key in ("CPU", "CUDA", "MPS"):
            lib.impl(name, run, key)
        lib.impl(name, autograd, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(op), lib=lib)
        OPS[name] = op
    return lib


def plan_of(name: str, *args: Any, **kwargs: Any) -> Plan | None:
    """The cached plan of a call that has run, for those who want to know what ran."""
    return _PLANS[name].get(PLAN_KEYS[name](*args, **kwargs))
