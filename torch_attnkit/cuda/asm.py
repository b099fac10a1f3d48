"""Inline PTX: one instruction, or a few in braces, as a function of a traced kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

_REGISTERS = {"i32": "r", "i64": "l", "f32": "f"}  # PTX's constraint for a register of a type


def asm(
    results: Any,
    arguments: Sequence[Any],
    text: str,
    *,
    volatile: bool = False,
    memory: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """What ``text`` gives: ``results`` is a type, a list of types for a tuple of values, or None.

    ``text`` names results $0, $1 ... and then the arguments, which are CuTeDSL numbers of 32 or 64 bits. ``volatile``:
    the text must run as often as it stands. ``memory``: besides, it reads or writes memory, and keeps its place among
    other accesses.
    """
    kinds = [] if results is None else results if isinstance(results, list) else [results]
    types = [kind.mlir_type for kind in kinds]
    values = [a.ir_value(loc=loc, ip=ip) for a in arguments]
    # Of several instructions one may write its result before another has read its arguments.
    result = "=&" if text.count(";") > 1 else "="
    constraints = [result + _REGISTERS[str(t)] for t in types] + [_REGISTERS[str(v.type)] for v in values]
    whole = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    got = llvm.inline_asm(
        whole, values, text, ",".join([*constraints, *(["~{memory}"] if memory else [])]),
        has_side_effects=volatile or memory, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if not kinds:
        return None
    parts = [got]
    if len(kinds) > 1:
        positions = [ir.DenseI64ArrayAttr.get([i]) for i in range(len(kinds))]
        parts = [llvm.extractvalue(t, got, at, loc=loc, ip=ip) for t, at in zip(types, positions, strict=True)]
    found = tuple(kind(part) for kind, part in zip(kinds, parts, strict=True))
    return found if isinstance(results, list) else found[0]


def half(dtype: Any) -> str:
    """PTX's name of BFloat16 or Float16."""
    return "bf16" if dtype is cutlass.BFloat16 else "f16"
