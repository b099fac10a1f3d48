"""Where a pointer of LLVM's intermediate language comes from: the object that its address was computed from."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DEFINED = re.compile(r"^\s+(%\S+) = (.*)$")
_SPACE = r"(?: addrspace\(\d\))?"
_STEP = re.compile(rf"getelementptr .*?, ptr{_SPACE} ([%@][^\s,]+)")
_BYTES = re.compile(rf"getelementptr (?:(?:inbounds|nuw|nusw) )*i8, ptr{_SPACE} (%[^\s,]+), i64 (-?\d+)")
_CAST = re.compile(rf"(?:inttoptr i64|ptrtoint ptr{_SPACE}|addrspacecast ptr{_SPACE}|freeze ptr{_SPACE}) ([%@][^\s,]+)")
_VARIABLE = re.compile(r"(?:tail )?call .*@msl_variable\(i32 (?:noundef )?(\d+)")
_CHOICE = re.compile(rf"select i1 ([^,]+), ptr{_SPACE} ([^\s,]+), ptr{_SPACE} ([^\s,]+)")
_INCOMING = re.compile(r"\[ ([^\s,]+), ")

# ("alloca", its name), ("global", its name), ("variable", its number) or ("argument", its name)
Base = tuple[str, str]


def operands(text: str) -> list[str]:
    """What stands between the commas outside of all brackets."""
    out, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            out.append(text[begin:i].strip())
            begin = i + 1
    return [*out, text[begin:].strip()]


STRUCTURE = re.compile(r"^(%\S+) = type (.*)$", re.M)
_ARRAY = re.compile(r"\[(\d+) x (.*)\]$")
_VECTOR = re.compile(r"<(\d+) x (.*)>$")
_SCALARS = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}


def allocation(kind: str, structures: Mapping[str, str]) -> tuple[int, int]:
    """Bytes and alignment of a type as memory holds it; ``structures`` are the types that have names.

    No bytes stand for a type that is not known here.
    """
    kind = structures.get(kind, kind)
    if match := _ARRAY.match(kind):
        size, align = allocation(match[2], structures)
        return int(match[1]) * size, align
    if match := _VECTOR.match(kind):
        size = 1 << (int(match[1]) * allocation(match[2], structures)[0] - 1).bit_length()
        return size, size
    if kind.startswith("{"):
        size, align = 0, 1
        for member in operands(kind[1:-1]) if kind.strip("{} ") else []:
            inner, own = allocation(member, structures)
            size, align = -(-size // own) * own + inner, max(align, own)
        return -(-size // align) * align, align
    if match := re.fullmatch(r"i(\d+)", kind):
        return -(-int(match[1]) // 8), -(-int(match[1]) // 8)
    size = _SCALARS.get(kind.partition(" ")[0], 0)
    return size, max(size, 1)


class Pointers:
    """The definitions of one function, line by line."""

    def __init__(self) -> None:
        self._definitions: dict[str, str] = {}
        self._known: dict[str, Base | None] = {}

    def define(self, line: str) -> None:
        if match := _DEFINED.match(line):
            self._definitions[match[1]] = match[2]

    def allocated(self, name: str) -> str:
        """The type that an alloca has room for."""
        return operands(self._definitions[name].removeprefix("alloca "))[0]

    def chosen(self, name: str) -> tuple[str, str, str] | None:
        """The condition and the two allocas of one type, between which it chooses, if ``name`` points into either."""
        while match := _STEP.match(self._definitions.get(name, "")):
            name = match[1]
        if (match := _CHOICE.match(self._definitions.get(name, ""))) is None:
            return None
        both = [self.base(n) for n in (match[2], match[3])]
        if any(b is None or b[0] != "alloca" for b in both):
            return None
        first, second = (b[1] for b in both if b is not None)
        return (match[1], first, second) if self.allocated(first) == self.allocated(second) else None

    def offset(self, name: str) -> int | None:
        """Bytes from the beginning of the object to where ``name`` points, or None where they are not a constant."""
        total = 0
        while not (text := self._definitions.get(name, "")).startswith("alloca "):
            if (match := _BYTES.match(text)) is None:
                return None
            name, total = match[1], total + int(match[2])
        return total

    def base(self, name: str) -> Base | None:
        """The object that ``name`` points into, or None if that is not known, or depends on the path taken."""
        if name not in self._known:
            found = self._bases(name, set())
            self._known[name] = found.pop() if len(found) == 1 else None
        return self._known[name]

    def _bases(self, name: str, seen: set[str]) -> set[Base | None]:
        if name.startswith(("@", "getelementptr")):
            at = re.search(r"@[\w.$]+", name)
            return {("global", at[0]) if at else None}
        if name in seen:  # a pointer that a loop moves on: what it began as counts
            return set()
        seen.add(name)
        if name not in self._definitions:
            return {("argument", name)}
        text = self._definitions[name]
        if text.startswith("alloca "):
            return {("alloca", name)}
        if match := _VARIABLE.match(text):
            return {("variable", match[1])}
        if match := _STEP.match(text) or _CAST.match(text):
            return self._bases(match[1], seen)
        if text.startswith("phi ptr"):
            sources = _INCOMING.findall(text)
        elif match := _CHOICE.match(text):
            sources = [match[2], match[3]]
        else:
            return {None}
        return {b for s in sources for b in self._bases(s, seen)}
