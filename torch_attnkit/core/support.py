"""Answers about the table: which rows there are, and what one call would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import native, runtimes
from .dispatch import OPS, build, resolve, unique
from .errors import UnsupportedError
from .op import Call, Kernel, Op
from .target import SIMULATED, WHERE, Target, target_of

_TYPES: dict[str, tuple[type, ...]] = {  # of the schema -> what Python may give; torch takes no bool for a number
    "int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "Tensor": (torch.Tensor,),
    "ScalarType": (torch.dtype,),
}  # fmt: skip


def support(arch: str | None = None) -> list[tuple[Op, int, Kernel, str]]:
    """Every row of the table with each arch it serves: (op, index of the row, row, arch)."""
    rows = [(op, i, row, a) for op in OPS.values() for i, row in enumerate(op.kernels) for a in row.archs]
    return [r for r in rows if arch in (None, r[3])]


def explain(op: str, *args: Any, target: str | None = None, **kwargs: Any) -> str:
    """What ``torch.ops.attnkit.<op>(*args, **kwargs)`` would do, step by step, without running it.

    Tensors may be on the ``meta`` device; ``target`` names another arch to ask about: cpu, or one of ``SIMULATED``.
    Rows that refuse for one reason are told of in one line. Raises ValueError for an op, an argument or a target that
    there is not, TypeError for what the op's schema does not take.
    """
    if op not in OPS:
        raise ValueError(f"explain: no op {op!r}; there are {', '.join(OPS)}")
    if target not in (None, "cpu", *SIMULATED):
        raise ValueError(f"explain: target is {target!r}, accepted: {', '.join(('cpu', *SIMULATED))}")
    record = OPS[op]
    values = tuple(args) + tuple(kwargs.pop(n, record.defaults.get(n)) for n in record.argnames[len(args) :])
    if kwargs:
        raise ValueError(f"explain: {op} has no argument {', '.join(kwargs)}; it has {', '.join(record.argnames)}")
    _check_types(record, values)
    lines = [record.schema]
    try:
        call = record.bind(values)
    except (TypeError, ValueError) as error:
        return "\n".join([*lines, f"refused: {type(error).__name__}: {error}"])
    lines.append(f"bound    {call.sizes()}" + (f", ...={call.batch}" if call.batch else ""))
    lines.append(f"dtype    {call.dtype}; features: {', '.join(call.features) or 'none'}")
    shapes = (f"{n} {s} {d}" for n, (s, d) in zip(record.outnames, record.outputs(call), strict=True))
    lines.append(f"returns  {'; '.join(shapes) or 'nothing (writes in place)'}")
    where = Target(target or "cpu") if target or call.device.type == "meta" else target_of(call.device)
    lines += [f"row      {line}" for line in unique(_answers(record, call, where))]
    try:
        chosen = resolve(record, call, where)
        source = record.sources(chosen)[0] if chosen else f"{record.package}.reference"
        lines.append(f"runs     {source.replace('.', '/')}.py on {where}")
        if where.arch in WHERE["cuda"] and not where.simulated:
            lines += [f"kernel   {line}" for line in runtimes.origins(lambda: build(record, call, where))]
            lines.append(f"host     {native.word}: eager calls of a signature that has run before")
    except UnsupportedError as error:
        lines.append(f"refused: UnsupportedError: {error}")
    return "\n".join(lines)


def _check_types(op: Op, values: tuple[Any, ...]) -> None:
    """What torch refuses in a call before it is ours, where ``bind`` expects what the schema says."""
    for argument, value in zip(op.parsed.arguments, values, strict=True):
        optional = str(argument.type).startswith("Optional[")
        # The parser of schemas knows a dtype as an int.
        kind = "ScalarType" if argument.name == "dtype" else str(argument.type).removeprefix("Optional[").rstrip("]")
        right = isinstance(value, _TYPES[kind]) and not (isinstance(value, bool) and kind in ("int", "float"))
        if not (right or (value is None and (optional or kind == "Tensor"))):  # ``bind`` says which tensor is missing
            raise TypeError(f"{op.name}: {argument.name} is {value!r}, accepted: {kind}{' or None' * optional}")


def _answers(op: Op, call: Call, where: Target) -> Iterator[str]:
    """What each row says."""
    for row in op.kernels:
        asked = where.arch in row.archs
        why = row.refusal(call) if asked else f"serves {', '.join(row.archs)}, not {where.arch}"
        yield f"{row.on}: {why or 'accepts'}"
