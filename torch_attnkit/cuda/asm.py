"""Inline PTX: one instruction, or a few in braces, as a function of a traced kernel. Imports cutlass."""

from __future__ import annotations

from typing import Any

from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm


def asm(
    results: list[Any], arguments: list[Any], text: str, *, effects: bool = False, loc: Any = None, ip: Any = None
) -> tuple[Any, ...]:
    """Values of the types ``results``, which ``text`` names $0, $1 ...; the arguments, CuTeDSL numbers, follow them.

    ``effects``: the text touches memory, or must run as often as it stands. A register's kind follows from its type:
    32 bits, 64 bits or float32.
    """
    letters = [_letter(kind) for kind in (*results, *(type(a) for a in arguments))]
    constraints = [f"={c}" if i < len(results) else c for i, c in enumerate(letters)]
    types = [kind.mlir_type for kind in results]
    whole = types[0] if len(types) == 1 else llvm.StructType.get_literal(types) if types else None
    got = llvm.inline_asm(
        whole, [a.ir_value(loc=loc, ip=ip) for a in arguments], text,
        ",".join([*constraints, *(["~{memory}"] if effects else [])]), has_side_effects=effects,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if len(results) < 2:
        return tuple(kind(got) for kind in results)
    places = (ir.DenseI64ArrayAttr.get([i]) for i in range(len(results)))
    return tuple(
        kind(llvm.extractvalue(kind.mlir_type, got, at, loc=loc, ip=ip))
        for kind, at in zip(results, places, strict=True)
    )


def _letter(kind: Any) -> str:
    """PTX's constraint for a register."""
    if kind.width == 64:
        return "l"
    return "f" if kind.is_float else "r"
