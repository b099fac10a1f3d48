"""The tokens of a Metal source: where they end, what they enclose, and on which line of the user's text they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .errors import refuse

_TOKEN = re.compile(
    r"""\#[^\n]*|\s+|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[A-Za-z_]\w*
    |0[xX][\da-fA-F.]+(?:[pP][+-]?\d+)?\w*|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\w*|::|->|<<|&&|\|\||.""",
    re.S | re.X,
)


def tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


def is_blank(token: str) -> bool:
    return token.isspace() or token[0] == "#" or token.startswith(("//", "/*"))


def after(ts: Sequence[str], i: int) -> int:
    """Index of the next token with a meaning."""
    i += 1
    while i < len(ts) and is_blank(ts[i]):
        i += 1
    return i


def before(ts: Sequence[str], i: int) -> int:
    i -= 1
    while i >= 0 and is_blank(ts[i]):
        i -= 1
    return i


def closing(ts: Sequence[str], i: int) -> int:
    """Index of the bracket that closes the one at ``i``; angle brackets are only followed if one is asked for."""
    if ts[i] == "<":
        return _closing_angle(ts, i)
    pair, depth = {"(": ")", "[": "]", "{": "}"}[ts[i]], 0
    for k in range(i, len(ts)):
        if ts[k] == ts[i]:
            depth += 1
        elif ts[k] == pair:
            depth -= 1
            if depth == 0:
                return k
    raise refuse(f"unbalanced {ts[i]}", line_of(ts, i))


def _closing_angle(ts: Sequence[str], i: int) -> int:
    """Inside of other brackets a ``<`` may be a comparison, so these are passed over."""
    depth, k = 0, i
    while k < len(ts):
        if ts[k] in ("(", "[", "{"):
            k = closing(ts, k)
        elif ts[k] in (")", "]", "}", ";"):
            break
        else:
            depth += angle(ts, k)
            if depth == 0:
                return k
        k += 1
    raise refuse("unbalanced <", line_of(ts, i))


def angle(ts: Sequence[str], k: int) -> int:
    """1 for a ``<`` that opens template arguments, -1 for what closes them, 0 for anything else, comparisons included.

    What stands before template arguments is a name, and ``<=`` and ``>=`` compare.
    """
    if ts[k] == ">":
        return 0 if ts[k + 1 : k + 2] == ["="] and ts[k + 2 : k + 3] != ["="] else -1
    if ts[k] != "<" or ts[k + 1 : k + 2] == ["="]:
        return 0
    previous = ts[before(ts, k)] if before(ts, k) >= 0 else ""
    return int(bool(re.match(r"[A-Za-z_]", previous)))


def line_of(ts: Sequence[str], i: int) -> int:
    """The line of a token in the user's source, from the markers that the preprocessor left."""
    line = 1
    for t in ts[:i]:
        if t[0] == "#" and (marker := re.match(r"#(?:line)? (\d+) \"", t)):
            line = int(marker[1]) - 1
        else:
            line += t.count("\n")
    return line


def split(ts: Sequence[str], by: str = ",") -> list[list[str]]:
    """Tokens between top-level separators, with angle brackets counted as brackets."""
    parts: list[list[str]] = [[]]
    depth = 0
    for k, t in enumerate(ts):
        depth += (t in "([{") - (t in ")]}") + angle(ts, k) if len(t) == 1 else 0
        if t == by and depth == 0:
            parts.append([])
        else:
            parts[-1].append(t)
    return parts


def plain(ts: Sequence[str]) -> str:
    return " ".join("".join(" " if is_blank(t) else t for t in ts).split())


def newlines(ts: Sequence[str]) -> str:
    return "\n" * sum(t.count("\n") for t in ts)


def attributes(ts: Sequence[str]) -> Iterator[tuple[int, int, list[str]]]:
    """(begin, end, names with arguments) of every [[...]]."""
    i = 0
    while i + 1 < len(ts):
        if ts[i] == "[" and ts[i + 1] == "[":
            end = closing(ts, i)
            yield i, end + 1, [plain(p) for p in split(ts[i + 2 : end - 1])]
            i = end
        i += 1
