"""Answers about the table: which rows there are, and what one call would do."""

from __future__ import annotations

from typing import Any

from .dispatch import OPS, resolve
from .errors import UnsupportedError
from .op import Kernel, Op
from .target import Target, target_of


def support(arch: str | None = None) -> list[tuple[Op, int, Kernel, str]]:
    """Every row of the table with each arch it serves: (op, index of the row, row, arch)."""
    rows = [(op, i, row, a) for op in OPS.values() for i, row in enumerate(op.kernels) for a in row.archs]
    return [r for r in rows if arch in (None, r[3])]


def explain(op: str, *args: Any, target: str | None = None, **kwargs: Any) -> str:
    """What ``torch.ops.attnkit.<op>(*args, **kwargs)`` would do, step by step, without running it.

    Tensors may be on the ``meta`` device; ``target`` names another arch to ask about (cpu, metal, sm90, sm100).
    """
    if op not in OPS:
        raise ValueError(f"explain: no op {op!r}; there are {', '.join(OPS)}")
    record = OPS[op]
    values = tuple(args) + tuple(kwargs.pop(n, record.defaults.get(n)) for n in record.argnames[len(args) :])
    if kwargs:
        raise ValueError(f"explain: {op} has no argument {', '.join(kwargs)}; it has {', '.join(record.argnames)}")
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
    for row in record.kernels:
        why = row.refusal(call) if where.arch in row.archs else f"serves {', '.join(row.archs)}, not {where.arch}"
        lines.append(f"row      {row.on}: {why or 'accepts'}")
    try:
        chosen = resolve(record, call, where)
        file = f"{record.package.replace('.', '/')}/{chosen.file if chosen else 'reference'}.py"
        lines.append(f"runs     {file} on {where}")
    except UnsupportedError as error:
        lines.append(f"refused: {error}")
    return "\n".join(lines)
