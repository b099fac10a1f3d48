"""What is added to a kernel between clang's optimiser and its code generator, as text of LLVM's intermediate language.

Collectives, barriers and bounds checks learn their place in the source, calls inlined into calls included. A checked
kernel reports every access to device, constant and threadgroup memory, a counting one its arithmetic as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

USER_FILE = "program_source"
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$", re.M)
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$", re.M)
_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "([^"]*)"', re.M)
_CALL = re.compile(r"(call .*@msl_(?:simd|barrier|simdgroup_barrier|matrix|atomic|trap)\(.*, i32 (?:noundef )?)-1\)")
_TRAP = re.compile(r"^(\s+)(?:tail )?call void @llvm\.ubsantrap\(i8 (\d+)\)")
_VARIABLE = re.compile(r"@msl_variable\(i32 (?:noundef )?(\d+), i64 (?:noundef )?(\d+), i64 (?:noundef )?(\d+)\)")
_MEMORY = re.compile(
    r"^\s+(?:%\S+ = (load)|(store)) (?:atomic )?(?:volatile )?(.*?), ptr addrspace\(([123])\) (.+?), align (\d+)"
)
_BLOCK_COPY = re.compile(r"call void @llvm\.mem(cpy|move|set)[\w.]*\((.*)\)")
_ARITHMETIC = re.compile(
    r"= (?:fadd|fsub|fmul|fdiv|frem) (?:(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc) )*"
    r"(?:<(\d+) x )?(?:half|float|bfloat)"
)
_FUSED = re.compile(r"call .*@llvm\.(?:fma|fmuladd)\.(?:v(\d+))?")
_SPECIAL = re.compile(r"call .*@(?:msl_math\(|llvm\.sqrt\.(?:v(\d+))?)")
_END_OF_BLOCK = re.compile(r"^\s+(?:br|ret|switch|unreachable)\b")
# Exchanging values orders no memory: what was loaded before a simd_sum need not be loaded again behind it.
_EXCHANGE = re.compile(r"^(declare (?:!dbg !\d+ )?void @msl_(?:simd|matrix)\(.*?\))", re.M)
# clang 22 stores a bool into a vector of bools as the byte that it is in memory.
_BOOL_ELEMENT = re.compile(r"^(.*insertelement <\d+ x i1> \S+, )i8 (\S+), (.*)$", re.M)
_WRITE, _SPACE, _ALIGN = 16, 17, 20
_DECLARATIONS = {
    "msl_trap": "void @msl_trap(i32, i32)",
    "msl_work": "void @msl_work(i32, i32) memory(inaccessiblemem: readwrite)",
    **{f"msl_access{n}": f"void @msl_access{n}(ptr addrspace({n}), i32, i32)" for n in (1, 2, 3)},
    **{f"msl_range{n}": f"void @msl_range{n}(ptr addrspace({n}), i64, i32, i32)" for n in (1, 2, 3)},
}

Site = tuple[tuple[int, int], ...]  # (line, column) of the outermost call first


@dataclass(frozen=True)
class Instrumented:
    text: str
    sites: list[Site]
    variables: dict[int, tuple[int, int]]  # number: (bytes, alignment)


class _Locations:
    """Places in the user's source by number of the debug location."""

    def __init__(self, text: str) -> None:
        files = dict(_FILE.findall(text))
        scopes = {n: self._fields(body) for n, body in _SCOPE.findall(text)}
        self._files = {n: files.get(f.get("file", "!")[1:], "") for n, f in scopes.items()}
        self._locations = {n: self._fields(body) for n, body in _LOCATION.findall(text)}
        self._known: dict[str, Site] = {}

    @staticmethod
    def _fields(body: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+): (!?\w+)", body))

    def site(self, number: str | None) -> Site:
        if number is None or number not in self._locations:
            return ()
        if number not in self._known:
            f = self._locations[number]
            outer = self.site(f["inlinedAt"][1:]) if "inlinedAt" in f else ()
            mine = self._files.get(f["scope"][1:]) == USER_FILE
            # Line 0 is code of the compiler's own, such as the checks of array indices.
            here = ((int(f["line"]), int(f.get("column", 0))),) if mine and f["line"] != "0" else ()
            self._known[number] = outer + here
        return self._known[number]


def _type_size(text: str) -> tuple[int, int]:
    """(bytes, length of the type's text) of the type at the beginning of ``text``."""
    if match := re.match(r"(?:\[|<)(\d+) x ", text):
        size, length = _type_size(text[match.end() :])
        return int(match[1]) * size, match.end() + length + 1
    if match := re.match(r"i(\d+)", text):
        return (int(match[1]) + 7) // 8, match.end()
    for name, size in (("half", 2), ("bfloat", 2), ("float", 4), ("double", 8)):
        if text.startswith(name):
            return size, len(name)
    if match := re.match(r"ptr(?: addrspace\(\d\))?", text):
        return 8, match.end()
    raise AssertionError(f"memory access of an unknown type: {text}")


def _operands(text: str) -> list[str]:
    out, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            out.append(text[begin:i].strip())
            begin = i + 1
    return [*out, text[begin:].strip()]


class _Pass:
    def __init__(self, text: str, checked: bool, counting: bool) -> None:
        self.lines = text.split("\n")
        self.locations = _Locations(text)
        self.checked, self.counting = checked, counting
        self.used: set[str] = set()
        self.variables: dict[int, tuple[int, int]] = {}
        self.marks: dict[Site, int] = {}
        self.out: list[str] = []

    def run(self) -> Instrumented:
        sites = sorted({s for s in map(self._site_of, self.lines) if s is not None})
        self.marks = {s: n for n, s in enumerate(sites)}
        flops = special = 0
        for line in self.lines:
            if self.counting:
                flops, special = self._count(line, flops, special)
            self._line(line)
        body = "\n".join(self.out)
        for name in sorted(self.used):
            if f"@{name}(" not in "\n".join(x for x in self.out if x.startswith("declare")):
                body += f"\ndeclare {_DECLARATIONS[name]}"
        return Instrumented(body, sites, self.variables)

    def _site_of(self, line: str) -> Site | None:
        if not line.startswith(" "):
            return None
        match = re.search(r"!dbg !(\d+)", line)
        return self.locations.site(match[1] if match else None)

    def _call(self, name: str, arguments: str) -> None:
        self.used.add(name)
        self.out.append(f"  call void @{name}({arguments})")

    def _line(self, line: str) -> None:
        if not line.startswith(" "):
            self.out.append(line)
            return
        site = self.marks[self._site_of(line) or ()] if self._site_of(line) is not None else -1
        if "@msl_" in line:
            line = _CALL.sub(rf"\g<1>{site})", line)
            for number, size, align in _VARIABLE.findall(line):
                self.variables[int(number)] = (int(size), int(align))
        elif match := _TRAP.match(line):
            self._call("msl_trap", f"i32 {match[2]}, i32 {site}")
            return
        elif self.checked and (match := _MEMORY.match(line)):
            self._access(match, site)
        elif self.checked and (match := _BLOCK_COPY.search(line)):
            self._block(match, site)
        self.out.append(line)

    def _access(self, match: re.Match[str], site: int) -> None:
        _, write, value, space, pointer, align = match.groups()
        if pointer.startswith(("@", "getelementptr")):
            return  # a constant of the program
        size, _ = _type_size(value)
        info = size | bool(write) << _WRITE | int(space) << _SPACE | (int(align).bit_length() - 1) << _ALIGN
        self._call(f"msl_access{space}", f"ptr addrspace({space}) {pointer}, i32 {info}, i32 {site}")

    def _block(self, match: re.Match[str], site: int) -> None:
        operands = _operands(match[2])
        size = operands[2].split(" ", 1)[1].removeprefix("noundef ")
        pointers = [(operands[0], True)] + ([(operands[1], False)] if match[1] != "set" else [])
        for operand, write in pointers:
            if space := re.match(r"ptr addrspace\(([123])\)", operand):
                pointer = operand.split(" ")[-1]
                if pointer.startswith("@") or operand.endswith(")"):
                    continue
                align = re.search(r"align (\d+)", operand)
                shift = int(align[1]).bit_length() - 1 if align else 0
                info = write << _WRITE | int(space[1]) << _SPACE | shift << _ALIGN
                arguments = f"ptr addrspace({space[1]}) {pointer}, i64 {size}, i32 {info}, i32 {site}"
                self._call(f"msl_range{space[1]}", arguments)

    def _count(self, line: str, flops: int, special: int) -> tuple[int, int]:
        if match := _ARITHMETIC.search(line):
            flops += int(match[1] or 1)
        elif match := _FUSED.search(line):
            flops += 2 * int(match[1] or 1)
        elif match := _SPECIAL.search(line):
            special += int(match[1] or 1)
        elif _END_OF_BLOCK.match(line):
            if flops or special:
                self._call("msl_work", f"i32 {flops}, i32 {special}")
            return 0, 0
        return flops, special


def repaired(text: str) -> str:
    """What the front end emitted, ready for the optimiser."""

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

    text = _EXCHANGE.sub(exchange, text)
    text = re.sub(r"^define .*$", internal, text, flags=re.M)
    return _BOOL_ELEMENT.sub(bit, text)


def instrument(text: str, checked: bool, counting: bool) -> Instrumented:
    """The kernel with its calls into the machine; ``text`` is optimised IR with line tables."""
    return _Pass(text, checked, counting).run()
