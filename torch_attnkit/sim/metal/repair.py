"""What is changed in a kernel between clang's front end and its optimiser, as text of LLVM's intermediate language.

Metal leaves the value of a division by zero undefined, LLVM the whole program, and a processor stops: so no divisor is
zero. A checked kernel is told where it divides by zero, and where an array of a thread begins without values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .pointers import STRUCTURE, Pointers, operands

# Exchanging values orders no memory: what was loaded before a simd_sum need not be loaded again behind it.
_EXCHANGE = re.compile(r"^(declare (?:!dbg !\d+ )?void @msl_(?:simd|matrix)\(.*?\))", re.M)
# clang 22 stores a bool into a vector of bools as the byte that it is in memory.
_BOOL_ELEMENT = re.compile(r"^(.*insertelement <\d+ x i1> \S+, )i8 (\S+), (.*)$", re.M)
_DIVISION = re.compile(r"^  (%\S+) = ([su])(div|rem) (?:exact )?(i\d+|<\d+ x i\d+>) (.*?)((?:, !\w+ !\d+)*)$")
_HARMLESS = re.compile(r"(?:splat \(i\d+ )?(?!0\b)\d+\)?$")
_ALLOCA = re.compile(r"^  (%\S+) = alloca (.*?), align")
_POINTED = re.compile(r"^  store ptr (%[^\s,]+), ptr ")
_PART = re.compile(r"^  (%\S+) = getelementptr .*?, ptr (%[^\s,]+)")
_UNSET = re.compile(
    r"^  (?:store .*, ptr (%[^\s,]+), align|call void @llvm\.mem\w+[\w.]*\(ptr [^%]*(%[^\s,]+),).*!annotation"
)
_DECLARED = {
    "msl_divide": "void @msl_divide(i1 zeroext, i1 zeroext, i32) nounwind",
    "msl_array": "void @msl_array(ptr, i64) nounwind",
    "msl_keep": "void @msl_keep(ptr captures(none)) nounwind willreturn memory(argmem: readwrite)",
}


def repaired(text: str, checked: bool, lockstep: bool = False) -> str:
    """What the front end emitted, ready for the optimiser; under ``lockstep`` exchanges of lanes order memory."""

    def bit(match: re.Match[str]) -> str:
        head, value, tail = match.groups()
        if value.isdigit():
            return f"{head}i1 {'true' if int(value) & 1 else 'false'}, {tail}"
        name = f"%msl.{match.start()}"
        return f"  {name} = trunc i8 {value} to i1\n{head}i1 {name}, {tail}"

    def internal(match: re.Match[str]) -> str:
        line = match[0]  # once everything is inlined, only the launcher has to stay
        if "@msl_" in line:
            return line
        return re.sub(r"^define (?:(?:internal|dso_local|weak_odr|linkonce_odr) )*", "define internal ", line).replace(
            " comdat", ""
        )

    def exchange(match: re.Match[str]) -> str:
        kept = match[1].replace("ptr noundef", "ptr noundef captures(none)")
        return f"{kept} memory(argmem: readwrite, inaccessiblemem: readwrite)"

    if not lockstep:
        text = _EXCHANGE.sub(exchange, text)
    text = re.sub(r"^define .*$", internal, text, flags=re.M)
    text = _BOOL_ELEMENT.sub(bit, text)
    text = "\n".join(_divisions(_arrays(text) if checked else text, checked))
    return text + "".join(f"\ndeclare {d}" for name, d in _DECLARED.items() if f"@{name}(" in text)


def _divisions(text: str, checked: bool) -> Iterator[str]:
    """Divide by one instead of by zero, and the smallest number by one instead of by -1, which overflows."""
    for number, line in enumerate(text.split("\n")):
        match = _DIVISION.match(line) if "div " in line or "rem " in line else None
        if match is None or _HARMLESS.match(operands(match[5])[1]):
            yield line
            continue
        _, sign, _, kind, both, location = match.groups()
        dividend, divisor = operands(both)
        lanes = re.match(r"<(\d+) x i(\d+)>|i(\d+)", kind)
        assert lanes is not None
        bits = int(lanes[2] or lanes[3])
        flag = f"<{lanes[1]} x i1>" if lanes[1] else "i1"
        value = lambda n: f"splat (i{bits} {n})" if lanes[1] else str(n)  # noqa: B023 (called at once)
        zero, over, bad, one = (f"%msl.{word}.{number}" for word in ("zero", "over", "bad", "one"))
        yield f"  {zero} = icmp eq {kind} {divisor}, {value(0)}"
        if sign == "s":
            yield f"  {over}.a = icmp eq {kind} {dividend}, {value(-(2 ** (bits - 1)))}"
            yield f"  {over}.b = icmp eq {kind} {divisor}, {value(-1)}"
            yield f"  {over} = and {flag} {over}.a, {over}.b"
        else:
            yield f"  {over} = xor {flag} {zero}, {zero}"
        if checked:
            yield from _report(zero, over, lanes[1], location)
        yield f"  {bad} = or {flag} {zero}, {over}"
        yield f"  {one} = select {flag} {bad}, {kind} {value(1)}, {kind} {divisor}"
        yield f"{line[: line.index(kind)]}{kind} {dividend}, {one}{location}"


def _report(zero: str, over: str, lanes: str | None, location: str) -> Iterator[str]:
    found = []
    for flag in (zero, over):
        if lanes:
            yield f"  {flag}.any = call i1 @llvm.vector.reduce.or.v{lanes}i1(<{lanes} x i1> {flag})"
        found.append(f"i1 zeroext {flag}{'.any' if lanes else ''}")
    yield f"  call void @msl_divide({', '.join(found)}, i32 -1){location}"


def _pointed(lines: Sequence[str]) -> set[str]:
    """The variables of a function that a pointer is set to."""
    names = {m[1] for line in lines if line.startswith("  store ptr %") and (m := _POINTED.match(line))}
    if not names:
        return names
    parts = {m[1]: m[2] for line in lines if "getelementptr" in line and (m := _PART.match(line))}
    while names & parts.keys():
        names = {parts.get(name, name) for name in names}
    return names


def _arrays(text: str) -> str:
    """A call for each array, or structure with one, that is declared without values.

    clang marks the pattern that it fills them with. The calls take its place: they also keep an array in memory, where
    every access to it can be seen. Arrays that are declared with values, and what a pointer is set to, are kept there
    by a call of their own, or the optimiser would drop what leads past their ends.
    """
    structs = dict(STRUCTURE.findall(text))

    def has_array(kind: str) -> bool:
        return "[" in kind or any(has_array(structs.get(name, "")) for name in re.findall(r'%[\w.:$"]+', kind))

    out: list[str] = []
    allocas: dict[str, str] = {}
    begun: set[str] = set()
    pointers = Pointers()
    pointed: set[str] = set()
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("define "):
            allocas, begun, pointers = {}, set(), Pointers()
            end = lines.index("}", number)
            pointed = _pointed(lines[number:end])
        pointers.define(line)
        if match := _ALLOCA.match(line):
            if has_array(match[2]):
                allocas[match[1]] = match[2]
            if match[2].startswith("[") or match[1] in pointed:
                line += f"\n  call void @msl_keep(ptr {match[1]})"
        elif "!annotation" in line and (match := _UNSET.match(line)):
            base = pointers.base(match[1] or match[2])
            if base is not None and base[1] in allocas:
                if base[1] not in begun:
                    begun.add(base[1])
                    size = f"ptrtoint (ptr getelementptr ({allocas[base[1]]}, ptr null, i32 1) to i64)"
                    out.append(f"  call void @msl_array(ptr {base[1]}, i64 {size})")
                continue
        out.append(line)
    return "\n".join(out)
