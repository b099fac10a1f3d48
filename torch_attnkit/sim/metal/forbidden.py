"""What Metal has not and clang's C++ has: words of the language, recursion, variables of the program.

A source that uses them is refused before it runs; what else Apple's compiler is known to refuse is for lint.py to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .errors import refuse
from .tokens import after, before, is_blank, line_of

_WORDS = {
    **dict.fromkeys(("try", "catch", "throw"), "Metal has no exceptions"),
    **dict.fromkeys(("new", "delete"), "Metal has no dynamic memory"),
    **dict.fromkeys(("dynamic_cast", "typeid"), "Metal has no run-time type information"),
    **dict.fromkeys(("asm", "__asm__", "__asm"), "Metal has no inline assembly"),
    **dict.fromkeys(("thread_local", "register"), "Metal has no such storage class"),
    **dict.fromkeys(("consteval", "constinit", "concept", "requires", "co_await", "co_yield", "co_return"), "is C++20"),
    "goto": "Metal has no goto",
    "virtual": "Metal has no virtual functions",
    "double": "Metal has no double",
    "__int128": "Metal has no integers of 128 bits",
    "std": "Metal has no std",
}
_CALLED = re.compile(r"call [^@]*@([\w.$]+)\(")
_DOUBLE = re.compile(r"= f\w+ (?:\w+ )*double\b")
_LONG_DOUBLE = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?[lL]")


def word(t: str, previous: str, following: str) -> str:
    """Why Metal refuses a token between two others, or nothing."""
    if t in _WORDS and (t != "std" or following == "::") and not (t == "delete" and previous == "="):
        return f"{t}: {_WORDS[t]}"
    if t == "long" and following == "long":
        return "long long: Metal has none, long has 64 bits"
    return f"{t}: Metal has no long double" if t[-1] in "lL" and _LONG_DOUBLE.fullmatch(t) else ""


def in_text(ts: Sequence[str]) -> None:
    """Raise SyntaxError for the first word that Metal has not."""
    for i, t in enumerate(ts):
        if is_blank(t) or not (t in _WORDS or t[-1] in "lL" or t == "long"):
            continue
        j, k = before(ts, i), after(ts, i)
        if said := word(t, ts[j] if j >= 0 else "", ts[k] if k < len(ts) else ""):
            raise refuse(said, line_of(ts, i))


def in_program(text: str) -> Iterator[str]:
    """What only shows in the compiled program: recursion, variables of the program, double precision."""
    calls: dict[str, set[str]] = {}
    mine: set[str] = set()
    for line in text.split("\n"):
        if line.startswith("  "):
            if "call " in line:
                mine.update(_CALLED.findall(line))
            if "double" in line and _DOUBLE.search(line):
                yield "arithmetic in double precision"
        elif line.startswith("@"):
            match = re.match(r"@([\w.$]+) = (.*)", line)
            if match and re.search(r"\bglobal\b", match[2]) and "addrspace(2)" not in match[2]:
                if not match[1].startswith("llvm."):
                    yield f"{_plain(match[1])}: a variable of the program must be constant"
        elif line.startswith("define ") and (match := re.search(r"@([\w.$]+)\(", line)):
            mine = calls[match[1]] = set()
    if (found := _cycle(calls)) is not None:
        yield f"{_plain(found)}: Metal has no recursion"


def _cycle(calls: dict[str, set[str]]) -> str | None:
    """A function that calls itself, over others perhaps."""
    done: set[str] = set()

    def below(f: str, path: tuple[str, ...]) -> str | None:
        if f in path:
            return f
        if f in done:
            return None
        found = next((c for g in sorted(calls.get(f, ())) if (c := below(g, (*path, f)))), None)
        done.add(f)
        return found

    return next((found for f in sorted(calls) if (found := below(f, ()))), None)


def _plain(name: str) -> str:
    """The name as it is written in the source, where that is no part of a longer one."""
    match = re.match(r"_ZL?(\d+)", name) or re.search(r"E(?=(\d+)[A-Za-z_]\w*$)\d+", name)
    return name[match.end() :][: int(match[1])] if match else name
