"""Conversions of vectors, found in clang's syntax tree and written out, because clang's own are not Metal's.

Between vectors of one size a cast of clang's keeps the bits, comparisons give -1 for true, and so does a bool that is
spread over a vector. Metal converts component by component, and true is 1. Whether ``T(x)`` is such a cast is known to
the compiler alone, so its dump of the tree is searched: what is found is replaced in the text by a call that says what
Metal means, and what cannot be replaced is refused. A source is done when nothing is found in it any more.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from . import calls, classes
from .errors import refuse
from .instrument import USER_FILE
from .tokens import closing, line_of, tokens

FILE = "unit.cpp"
BEGINS, ENDS = "msl_user_begins", "msl_user_ends"  # declared before and behind the user's text
# Types of values as the tree has them: what is no pointer and no reference ends in its own attribute or name.
_VECTOR = r"'[^'\n]*ext_vector_type\(\d+\)\)\)(?: const)?'"
_COMPARED = re.compile(
    rf"(?:{_VECTOR}(?: contains-errors)? '(?:<|>|<=|>=|==|!=|&&|\|\|)'|{_VECTOR}(?: contains-errors)? prefix '!')"
)
# A pointer to a vector may end in the vector's attribute, too.
_REINTERPRETED = re.compile(r"(?<!\*)(?<!\* __attribute__\(\(ext_vector_type\(\d\)\)\))'[^']* <BitCast>")
_BOOLS_IN_MEMORY = re.compile(r"\bbool __attribute__\(\(address_space\(\d\)\)\) __attribute__\(\(ext_vector_type")
_OTHER_SIZE = re.compile(
    rf"^{re.escape(FILE)}:\d+:\d+:\{{(\d+):(\d+)-(\d+):(\d+)\}}.*: error: "
    r"(?:[\w -]*from vector '.* to vector '.*different size"
    r"|(?:functional|C)-style cast from '[^'\n]*'(?: \(aka '[^'\n]*'\))?"
    r" to '(?:half|bfloat|_Float16|__bf16)'.* not allowed)",
    re.M,
)
_NODE = re.compile(r"[ |`-]*(\w+) 0x[\da-f]+ ")
_RANGE = re.compile(r"<([^<>]+)>")
_PLACE = re.compile(r"(?<![^\s<])(?:line:(\d+):(\d+)|col:(\d+)|([^\s<>:']+):(\d+):(\d+))(?![^\s>,])")
# What Metal does not convert, explicitly or at all, with the line of the tree that says so.
_UNWRITTEN = (
    (
        re.compile(r"Cast(?:Expr)? 0x[^\n]*<AddressSpaceConversion>"),
        "a pointer or reference is cast into another address space: Metal keeps what it points to",
    ),
    (
        re.compile(
            r"ImplicitCastExpr 0x[^\n]*'(?:_Float16|__bf16)' <FloatingCast>\n"
            r"[ |`-]*\w+ 0x\w+ <[^>\n]*> (?:'[^'\n]*':)?'(?:_Float16|__bf16)'"
        ),
        "half and bfloat do not convert into one another: write float(x), half(x) or bfloat(x)",
    ),
)
_LINE = re.compile(rf"(?:{USER_FILE}|line):(\d+):\d+")
_CALLS = {"truth": "msl_truth", "number": "msl_number"}
_CASTS = ("CStyleCastExpr", "CXXFunctionalCastExpr")


def suspicious(dump: str) -> bool:
    """Whether there is something to rewrite, or to refuse, anywhere in the tree."""
    lines = dump.split("\n")
    return any(_kind(line, previous) for previous, line in pairwise(lines))


def refuse_unwritten(dump: str) -> None:
    """Raise SyntaxError for a conversion in the user's part of the tree that clang has and Metal has not."""
    user = dump[dump.find(BEGINS) : dump.find(ENDS)]
    for pattern, words in _UNWRITTEN:
        if found := pattern.search(user):
            line = next((m[1] for m in reversed([*_LINE.finditer(user, 0, found.end())])), None)
            raise refuse(words, int(line) if line else None)


def flat(text: str) -> str:
    """The text without the preprocessor's line markers, so that clang's lines are those of the text."""
    return re.sub(r"^#[^\n]*", "", text, flags=re.M)


def _kind(line: str, previous: str) -> str:
    """What a line of the dump is found for, or nothing. The line before an argument names the function called."""
    if "<BooleanToSignedIntegral>" in line:
        return "number"
    if "<BitCast>" in line:
        return "cast" if _REINTERPRETED.search(line) and "(*)(" not in line else ""  # of functions: an error follows
    if "ext_vector_type" in line:
        if _COMPARED.search(line) and "'bool __attribute__" not in line and f"'{_CALLS['truth']}'" not in previous:
            return "truth"
        if _BOOLS_IN_MEMORY.search(line):
            return "memory"
    return ""


@dataclass(frozen=True)
class _Found:
    """Something in the text from ``begin`` to behind ``end``, and the kind of node of the tree that it is."""

    kind: str
    node: str
    begin: int
    end: int


class _Text:
    """A flat text whose places are (line, column), both from 1, behind ``skipped`` lines that are not part of it."""

    def __init__(self, text: str, skipped: int) -> None:
        self.text, self.skipped = text, skipped
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def offset(self, line: int, column: int) -> int:
        return self.starts[line - 1 - self.skipped] + column - 1

    def token_end(self, offset: int) -> int:
        return offset + len(tokens(self.text[offset : offset + 4096])[0])

    def line(self, offset: int) -> int:
        return bisect_right(self.starts, offset)


def _walk(dump: str) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """(line of the dump, places in it) of the user's part. A place leaves out what equals the place before it."""
    begin, end = dump.find(BEGINS), dump.find(ENDS)
    file, line = FILE, 0
    for text in dump[dump.rfind("\n", 0, begin) + 1 : end].split("\n"):
        places = []
        for m in _PLACE.finditer(text.partition("'")[0]):
            if m[4]:
                file = m[4]
            line = int(m[1] or m[5] or line)
            places.append((file, line, int(m[2] or m[3] or m[6])))
        yield text, places


def _found(text: _Text, dump: str, messages: str) -> Iterator[_Found]:
    previous = line = ""
    for following, places in _walk(dump):
        previous, line = line, following
        kind = _kind(line, previous)
        if not kind:
            continue
        node, ranges = _NODE.match(line), _RANGE.search(line)
        inside = ranges is not None and bool(places) and all(p[0] == FILE for p in places[:2])
        if not inside or node is None:
            raise refuse(f"a vector is reinterpreted where this cannot be written out: {line.strip(' |`-')}")
        first, last = places[0], places[1] if ranges is not None and "," in ranges[1] else places[0]
        yield _Found(kind, node[1], text.offset(*first[1:]), text.token_end(text.offset(*last[1:])))
    for m in _OTHER_SIZE.finditer(messages):
        yield _Found("cast", _CASTS[0], text.offset(int(m[1]), int(m[2])), text.offset(int(m[3]), int(m[4])))


def _cast(text: _Text, found: _Found) -> Iterator[tuple[int, int, str]]:
    """``(T)x`` and ``T(x)`` become ``msl::cast<T>(x)``."""
    ts = tokens(text.text[found.begin : found.end])
    if ts[0] == "(":
        close = closing(ts, 0)
        width = sum(map(len, ts[: close + 1]))
        yield found.begin, found.begin + width, f"msl::cast<{''.join(ts[1:close])}>("
        yield found.end, found.end, ")"
        return
    opening = next(k for k in range(len(ts)) if ts[k] in ("(", "{") and closing(ts, k) == len(ts) - 1)
    width = sum(map(len, ts[:opening]))
    yield found.begin, found.begin + width, f"msl::cast<{''.join(ts[:opening])}>"
    if ts[opening] == "{":
        yield found.begin + width, found.begin + width + 1, "("
        yield found.end - 1, found.end, ")"


def _edits(text: _Text, found: _Found) -> Iterator[tuple[int, int, str]]:
    if found.kind == "cast":
        yield from _cast(text, found)
    else:
        yield found.begin, found.begin, f"{_CALLS[found.kind]}("
        yield found.end, found.end, ")"


def _refused(text: _Text, original: str, found: _Found) -> SyntaxError:
    words = {
        "cast": "a vector would be reinterpreted here: write as_type<T>(x) to keep its bits, T(x) to convert it",
        "memory": "vec<bool, N> in memory is not simulated: write bool2, bool3 or bool4",
    }
    ts = tokens("\n".join(original.split("\n")[: text.line(found.begin)]))
    return refuse(words[found.kind], line_of(ts, len(ts)))


def rewritten(original: str, skipped: int, dump: str, messages: str, methods: classes.Methods) -> str:
    """The user's text with what clang understood otherwise than Metal written out; as it was if there is nothing.

    ``dump`` and ``messages`` are clang's about the flat text behind ``skipped`` other lines. Raises SyntaxError where
    a vector is reinterpreted by other means than a cast that is written in the text.
    """
    text = _Text(flat(original), skipped)
    edits: list[tuple[int, int, str]] = []
    casts: set[tuple[int, int]] = set()
    # What encloses comes first, so that its text stands first where two begin at one place.
    for found in sorted(set(_found(text, dump, messages)), key=lambda f: (f.begin, -f.end)):
        if found.kind == "memory" or (found.kind == "cast" and found.node not in _CASTS):
            raise _refused(text, original, found)
        # A cast in a template can be one of equal size for some types and, as an error, of another size for others.
        if found.kind != "cast" or (found.begin, found.end) not in casts:
            edits += _edits(text, found)
            casts.add((found.begin, found.end))
    behind = lambda place: text.text[text.offset(*place[2:]) :][:80]
    for edit in sorted(set(classes.copies(messages, behind, methods)), key=lambda e: (e[0][:2], (-e[0][2], -e[0][3]))):
        edits += _copied(text, edit)
    # What an earlier round has enclosed is given again by an error that remains.
    edits += sorted(set(calls.edits(text.text, messages, text.offset)) - set(edits))
    return _applied(original, text, edits)


def _copied(text: _Text, edit: classes.Edit) -> Iterator[tuple[int, int, str]]:
    """What stands around an object that lies in another address space, unless it stands there already."""
    place, opening, close = edit
    begin, end = text.offset(*place[:2]), text.offset(*place[2:])
    inside = text.text[begin:end]
    if inside.startswith((opening, "{")) or text.text[:begin].endswith(opening):
        return
    arrow = text.text[end:].startswith("->")
    if arrow:
        yield begin, begin, f"{opening}*("
        yield end, end + 2, f")){close[1:]}."
    else:
        yield begin, begin, opening
        yield end, end, close


def _applied(original: str, text: _Text, edits: list[tuple[int, int, str]]) -> str:
    """The original with edits whose places are those of the flat text."""
    starts = [0, *(m.end() for m in re.finditer("\n", original))]

    def place(offset: int) -> int:
        at = text.line(offset) - 1
        return starts[at] + offset - text.starts[at]

    out, done = [], 0
    for begin, end, new in sorted(edits, key=lambda e: e[:2]):
        out += [original[done : place(begin)], new]
        done = place(end)
    return "".join([*out, original[done:]])
