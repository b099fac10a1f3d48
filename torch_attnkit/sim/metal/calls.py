"""Arguments that Metal converts and clang's C++ does not, found by clang's errors and written out.

A vector that is initialised by several values, a list in braces where a vector is wanted, and an object in another
address space where its value is wanted: which of them an argument is depends on types, which the compiler alone knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .classes import ELSEWHERE
from .tokens import after, angle, closing, is_blank, tokens

_FILE_AT = r"^[^\s:]+:(\d+):(\d+):[^\s]* error: "
_EXCESS = re.compile(_FILE_AT + r"excess elements in scalar initializer", re.M)
_NO_MATCH = re.compile(
    _FILE_AT + r"no matching (?:member )?function for call to [^\n]*((?:\n(?!\S+: error:).*)*)", re.M
)
_BRACES = "cannot convert initializer list argument to '"
_NTH = re.compile(rf"no known conversion from '{ELSEWHERE}'[^\n]* for (\d+)\w\w argument")

Edit = tuple[int, int, str]  # begin, end, what takes their place


def edits(text: str, messages: str, offset: Callable[[int, int], int]) -> Iterator[Edit]:
    """What the errors ask for; ``offset`` is that of a line and column in ``text``."""
    for m in _EXCESS.finditer(messages):
        begin = offset(int(m[1]), int(m[2]))
        name = tokens(text[begin : begin + 256])[0]
        if not (found := _arguments(text, begin)):
            continue
        made = f"msl::made<decltype({name})>("
        if _initialises_member(text, begin):
            yield found[0][0], found[0][0], made
            yield found[-1][1], found[-1][1], ")"
        else:
            opening = text.index("(", begin)
            yield opening, opening + 1, f" = {made}"
    for m in _NO_MATCH.finditer(messages):
        begin = offset(int(m[1]), int(m[2]))
        arguments = _arguments(text, begin)
        nth = {int(n) for n in _NTH.findall(m[3])}
        for n, (first, last) in enumerate(arguments, 1):
            if _BRACES in m[3] and text[first] == "{":
                yield first, first + 1, "msl::braced("
                yield last - 1, last, ")"
            elif n in nth and not text.startswith("msl::value(", first):
                yield first, first, "msl::value("
                yield last, last, ")"


def _initialises_member(text: str, begin: int) -> bool:
    """Whether the name at ``begin`` stands behind the colon of a constructor."""
    ts = tokens(text[max(text.rfind("{", 0, begin), text.rfind(";", 0, begin)) + 1 : begin])
    return ":" in ts and ")" in ts[: ts.index(":")]


def _arguments(text: str, begin: int) -> list[tuple[int, int]]:
    """Begin and end of the arguments of the call whose name stands at ``begin``."""
    ts = tokens(text[begin : begin + 4096])
    k = 0
    if k < len(ts) and angle(ts, after(ts, k)) == 1:
        k = closing(ts, after(ts, k))
    k = after(ts, k)
    if k >= len(ts) or ts[k] != "(":
        return []
    end, found, depth = closing(ts, k), list[tuple[int, int]](), 0
    at = begin + sum(map(len, ts[: k + 1]))
    first = last = -1
    for n in range(k + 1, end + 1):
        depth += (ts[n] in ("(", "[", "{")) - (ts[n] in (")", "]", "}")) + angle(ts, n)
        if n == end or (ts[n] == "," and depth == 0):
            if first >= 0:
                found.append((first, last))
            first = -1
        elif not is_blank(ts[n]):
            first, last = (at if first < 0 else first), at + len(ts[n])
        at += len(ts[n])
    return found
