"""Objects of classes in device, constant and threadgroup memory, which Metal copies and calls as any other.

In clang's C++ the copy of a class is made from thread memory alone, and a method is called on objects there alone.
Which expressions lie elsewhere is known to the compiler, so its errors say where the text is to be rewritten: what is
read becomes ``msl::value(x)``, what is assigned ``msl::place(x) = ...`` (``include/msl_copy.h``). Methods that are
written once for each address space, as Metal asks, become one, which is called on a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .errors import refuse
from .tokens import after, before, closing, is_blank, line_of, plain

_SPACES = ("device", "constant", "threadgroup")
ELSEWHERE = r"[^']*\b(?:device|constant|threadgroup|address_space)\b[^']*"
# Of an error: line, column, and the ranges behind them. The type that it names must lie in another address space.
_AT = r"^[^\s:]+:\d+:\d+:((?:\{\d+:\d+-\d+:\d+\})+): error: "
_COPY = re.compile(_AT + r"no matching constructor for initialization of .*((?:\n(?!\S+: error:).*)*)", re.M)
_ASSIGNED = re.compile(_AT + r"no viable overloaded '=' *((?:\n(?!\S+: error:).*)*)", re.M)
_CONVERTED = re.compile(
    _AT + rf"(?:no viable conversion from|no matching conversion for [\w -]+ from|cannot convert) '({ELSEWHERE})'"
    r"(?: \(aka '[^']*'\))? to '([^']*)'",
    re.M,
)
_EITHER = re.compile(_AT + r"incompatible operand types \(", re.M)
_INCOMPATIBLE = re.compile(_AT + rf"assigning to '[^']*' from incompatible type '({ELSEWHERE})'", re.M)
_CALLED = re.compile(
    _AT + rf"(?:'this' argument to member function '.*' has type '({ELSEWHERE})'"
    rf"|cannot initialize object parameter of type '.*' with an expression of type '({ELSEWHERE})')",
    re.M,
)
_INDEXED = re.compile(
    _AT + rf"(?:no viable overloaded operator\[\] for type|type) '({ELSEWHERE})'(?: does not provide a subscript.*)?",
    re.M,
)
_OPERANDS = re.compile(_AT + rf"invalid operands to binary expression \(.*{ELSEWHERE}.*\)", re.M)
_PACKED = re.compile(
    _AT
    + r"(?:cannot convert between vector and non-scalar values|invalid operands to binary expression) \(.*packed_.*\)",
    re.M,
)
_NUMBER = re.compile(  # or a vector
    r"(?:const )?(?:(?:unsigned|signed) \w+|_Float16|__bf16|bool|size_t|b?float|half|u?(?:int|short|char|long)[234]?"
    r"|(?:b?float|half)[234]|u?int\d+_t)\b.*"
)
_RANGE = re.compile(r"\{(\d+):(\d+)-(\d+):(\d+)\}")

Place = tuple[int, int, int, int]  # line and column of the begin, of what is behind the end
Edit = tuple[Place, str, str]  # what is enclosed, and the texts before and behind it


@dataclass(frozen=True)
class Methods:
    """The methods that a source has for objects outside thread memory: "device get", "constant operator"."""

    names: frozenset[str]

    def has(self, kind: str, name: str) -> bool:
        """Whether a method is there for an object of the type ``kind``, as clang writes it."""
        if "packed_" in kind or "os_log" in kind:  # of the prelude, in every address space
            return True
        spaces = (s for n, s in enumerate(_SPACES, 1) if re.search(rf"\b{s}\b|address_space\({n}\)", kind))
        return any(f"{space} {name}" in self.names for space in spaces)


def copies(messages: str, text: Callable[[Place], str], methods: Methods) -> Iterator[Edit]:
    """Edits that an error of the compiler asks for; ``text`` gives what stands behind a place."""
    for m in _COPY.finditer(messages):
        if "address space" in m[2]:
            yield from _values(m[1])
    for m in _ASSIGNED.finditer(messages):
        places = _places(m[1])
        if "address space" in m[2] and len(places) == 2:
            yield places[0], "msl::place(", ")"
            yield places[1], "msl::value(", ")"
    for m in _CONVERTED.finditer(messages):
        known = not _NUMBER.fullmatch(m[3]) or methods.has(m[2], "operator")
        yield from ((place, "msl::value(" if known else "msl::held(", ")") for place in _places(m[1]))
    for m in _EITHER.finditer(messages):
        yield from _values(m[1])
    for m in _INCOMPATIBLE.finditer(messages):
        yield from ((place, "msl::value(", ")") for place in _places(m[1])[-1:])
    for m in _OPERANDS.finditer(messages):
        yield from _values(m[1])
    for m in _PACKED.finditer(messages):
        for place in _places(m[1]):
            yield place, "msl::unpacked(", ")"
    for m in _CALLED.finditer(messages):
        place = _places(m[1])[0]
        name = re.match(r"(?:\.|->)\s*(\w+)", text(place))
        if name and methods.has(m[2] or m[3], name[1]):
            yield place, "msl::object(", ")"
    for m in _INDEXED.finditer(messages):
        kind = m[2]
        parts = "columns" if re.search(r"\bmatrix<|\d+x\d\b", kind) else "all" if "packed_" in kind else ""
        if parts:
            yield _places(m[1])[0], "(", f").{parts}"
        elif methods.has(kind, "operator"):
            yield _places(m[1])[0], "msl::object(", ")"


def _places(ranges: str) -> list[Place]:
    return [(int(a), int(b), int(c), int(d)) for a, b, c, d in _RANGE.findall(ranges)]


def _values(ranges: str) -> Iterator[Edit]:
    for place in _places(ranges):
        yield place, "msl::value(", ")"


def methods(ts: Sequence[str]) -> tuple[list[str], list[tuple[int, int, str]]]:
    """Names as in Methods, and edits that leave one of the methods that differ in their address space alone."""
    names: list[str] = []
    edits: list[tuple[int, int, str]] = []
    for i, t in enumerate(ts):
        if t in ("struct", "class") and (body := _body(ts, i)) is not None:
            edits += _of_class(ts, body, closing(ts, body), names)
    return sorted(set(names)), edits


def _body(ts: Sequence[str], i: int) -> int | None:
    """The brace that opens the class which is declared at ``i``, if its members are declared there."""
    depth = 0
    for k in range(i + 1, len(ts)):
        depth += (ts[k] == "<") - (ts[k] == ">")
        if depth < 0 or ts[k] in (";", "(", ")", "=", ",") and depth == 0:
            return None
        if ts[k] == "{" and depth == 0:
            return k
    return None


def _of_class(ts: Sequence[str], opening: int, end: int, names: list[str]) -> Iterator[tuple[int, int, str]]:
    known: dict[str, tuple[str, bool]] = {}  # signature: the rest of the method, whether it is kept as it stands
    found = list(_qualified(ts, opening, end))
    own = {signature for signature, space, *_ in found if space in ("", "thread")}
    for signature, space, at, _, stop in found:
        if space in ("", "thread"):
            known[signature] = plain(ts[at + 1 : stop]), True
    for signature, space, at, begin, stop in found:
        # Metal lets such a constructor leave members without a value, C++17 does not.
        defaulted = ts[after(ts, at)] == "=" or ts[at] == "="
        yield from ((k, k + 1, "") for k in range(begin, stop) if defaulted and ts[k] == "constexpr")
        if space in ("", "thread"):
            continue
        rest = plain(ts[at + 1 : stop])
        name = re.search(r"\boperator\b|\w+(?= ?\()", signature)
        names.append(f"{space} {name[0] if name else ''}")
        if signature not in known:
            known[signature] = rest, False
            yield at, at + 1, ""
            continue
        if known[signature][0] != rest:
            other = "" if signature in own else "another address space and in "
            raise refuse(f"a method that is another one in {other}{space} memory is not simulated", line_of(ts, at))
        yield begin, stop, "".join("\n" * t.count("\n") for t in ts[begin:stop])


def _qualified(ts: Sequence[str], opening: int, end: int) -> Iterator[tuple[str, str, int, int, int]]:
    """(signature, address space, index of it, begin, end) of the methods that are declared between the braces."""
    begin = k = opening + 1
    while k < end:
        t = ts[k]
        if t == "(":
            close = closing(ts, k)
            at = after(ts, close)
            while ts[at] in ("const", "constexpr", "volatile", "noexcept"):
                at = after(ts, at)
            space = ts[at] if ts[at] in (*_SPACES, "thread") else ""
            last = at if space else before(ts, at)
            following = ts[after(ts, last)]
            if following in ("{", ":", ";", "="):
                stop = _end(ts, after(ts, last))
                signature = plain([x for x in ts[begin : last + (not space)] if not is_blank(x) or x.isspace()])
                yield signature, space, last, begin, stop
                begin = k = stop
                continue
            k = close
        elif t == "{":
            k = closing(ts, k)
        elif t == "template" and ts[after(ts, k)] == "<":
            k = closing(ts, after(ts, k))
        elif t == "=" and "operator" not in ts[begin:k]:  # a member with its value
            while ts[k] != ";":
                k = closing(ts, k) + 1 if ts[k] in ("(", "{", "[") else k + 1
            begin = k + 1
        elif t in (";", ":") and (t == ";" or ts[before(ts, k)] in ("public", "private", "protected")):
            begin = k + 1
        k += 1


def _end(ts: Sequence[str], k: int) -> int:
    """Index behind a method whose body, initialisers or semicolon begin at ``k``."""
    if ts[k] in (";", "="):
        return next(e for e in range(k, len(ts)) if ts[e] == ";") + 1
    if ts[k] == ":":
        while True:
            k = after(ts, k)
            while ts[k] not in ("(", "{"):
                k = closing(ts, k) + 1 if ts[k] == "<" else after(ts, k)
            k = after(ts, closing(ts, k))
            if ts[k] != ",":
                break
    stop = closing(ts, k) + 1
    return after(ts, stop - 1) + 1 if after(ts, stop - 1) < len(ts) and ts[after(ts, stop - 1)] == ";" else stop
