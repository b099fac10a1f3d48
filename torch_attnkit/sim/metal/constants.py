"""Function constants: values that a source leaves open and that are given when one of its kernels is made.

``torch.mps.compile_shader`` has no way to give them, other runtimes have (Metal Shading Language, "Function
Constants"). A constant becomes one of C++ whose value is a macro, in words that no constant expression may hold: an
array cannot have it as its extent, nor a template as its argument.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import refuse
from .tokens import after, attributes, before, closing, line_of, plain

_INDEX = re.compile(r"function_constant ?\((.*)\)")
_SUM = re.compile(r"[\d\s+()]+")
_WORDS = {"constant", "constexpr", "const", "static", "inline"}
_FLOATS = {"float": "float", "half": "half"}
_INTEGERS = {"bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"} | {
    f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)
}

Value = bool | int | float


@dataclass(frozen=True)
class Constant:
    """A function constant: its name and its type, as written."""

    name: str
    type: str


def declared(ts: Sequence[str]) -> tuple[dict[int, Constant], list[tuple[int, int, str]]]:
    """Constants by index, and the edits that make variables of C++ of them. Attributes of parameters are left alone."""
    found: dict[int, Constant] = {}
    edits: list[tuple[int, int, str]] = []
    for begin, end, names in attributes(ts):
        index = next((m[1] for n in names if (m := _INDEX.fullmatch(n))), None)
        if index is None or not _SUM.fullmatch(index):
            continue  # of a parameter it names another constant
        number = sum(int(n) for n in re.findall(r"\d+", index))
        name, kind = ts[before(ts, begin)], _type(ts, begin)
        if kind not in _INTEGERS and kind not in _FLOATS:
            raise refuse(f"a function constant of type {kind} is not simulated", line_of(ts, begin))
        found[number] = Constant(name, kind)
        edits.append((begin, end, f"= MSL_CONSTANT_{number}"))
        k = before(ts, begin)
        while k >= 0 and ts[k] not in (";", "{", "}"):
            if ts[k] == "constexpr":  # which it is not, in Metal neither
                edits.append((k, k + 1, ""))
            k = before(ts, k)
    numbers = {c.name: n for n, c in found.items()}
    for i, t in enumerate(ts):
        if t == "is_function_constant_defined":
            end = closing(ts, after(ts, i))
            name = plain(ts[after(ts, i) + 1 : end])
            if name not in numbers:
                raise refuse(f"is_function_constant_defined({name}): it is none", line_of(ts, i))
            edits.append((i, end + 1, f"MSL_DEFINED_{numbers[name]}"))
    return found, edits


def _type(ts: Sequence[str], attribute: int) -> str:
    """The type of the declaration that an attribute ends."""
    k, words = before(ts, before(ts, attribute)), list[str]()
    while k >= 0 and ts[k] not in (";", "{", "}", ">") and ts[k][0] != "#":
        words.insert(0, ts[k])
        k = before(ts, k)
    return plain([w for w in words if w not in _WORDS])


def macros(constants: Mapping[int, Constant], values: Mapping[int, Value]) -> list[str]:
    """clang's flags for the values of all constants; those that are not given are undefined, and hold 0."""
    flags = []
    for number, c in constants.items():
        value = values.get(number, 0)
        if c.type in _FLOATS:
            bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]
            text = f"({c.type})__builtin_bit_cast(float,(unsigned)(unsigned long)(void*){bits}ul)"
        else:
            text = f"({c.type})(long)(void*){int(value)}l"
        flags += [
            f"-DMSL_CONSTANT_{number}=({text})",
            f"-DMSL_DEFINED_{number}={'true' if number in values else 'false'}",
        ]
    return flags
