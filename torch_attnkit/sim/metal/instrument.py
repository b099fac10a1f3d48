"""What is added to a kernel between clang's optimiser and its code generator, as text of LLVM's intermediate language.

Collectives, barriers and bounds checks learn their place in the source, calls inlined into calls included. A checked
kernel reports every access to device, constant and threadgroup memory, a counting one its arithmetic as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .pointers import Pointers, operands

USER_FILE = "program_source"
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$", re.M)
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock|DILexicalBlockFile)\((.*)\)$", re.M)
_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "([^"]*)"', re.M)
_CALL = re.compile(
    r"(call .*@msl_(?:simd|barrier|simdgroup_barrier|matrix|atomic|trap|divide)\(.*, i32 (?:noundef )?)-1\)"
)
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
# Of 64 bits are addresses, which no arithmetic unit that a kernel's author thinks of works out: they do not count.
_INTEGER = re.compile(
    r"= (?:add|sub|mul|udiv|sdiv|urem|srem|shl|lshr|ashr|and|or|xor) (?:(?:nuw|nsw|exact|disjoint) )*"
    r"(?:<(\d+) x )?i(?:8|16|32)\b"
    r"|call .*@llvm\.(?:[us]min|[us]max|abs|fsh[lr]|ctpop|ctlz|cttz|bitreverse|bswap)\.(?:v(\d+))?i(?:8|16|32)\b"
)
_CONVERSION = re.compile(
    r"= (?:fptrunc|fpext|fptoui|fptosi|uitofp|sitofp) (?:(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc|nneg) )*"
    r"(?:<(\d+) x )?\w"
)
_CHOICE = re.compile(r"= (?:icmp|fcmp|select) [^%<]*(?:<(\d+) x )?")
_END_OF_BLOCK = re.compile(r"^\s+(?:br|ret|switch|unreachable)\b")
_LABEL = re.compile(r"^([\w.$-]+):")
_TARGET = re.compile(r"label %([\w.$-]+)")
_THREAD = re.compile(r"^\s+(?:(%\S+) = load|store) (?:volatile )?(.*?), ptr (%[^\s,]+), align")
_GLOBAL = re.compile(r"^(@[\w.$]+) = .*?\b(?:constant|global) (.*)$", re.M)
_WRITE, _SPACE, _ALIGN, _OBJECT = 16, 17, 20, 24
_MOST_VARIABLES = 127  # that an access can name
_DECLARATIONS = {
    "msl_trap": "void @msl_trap(i32, i32)",
    "msl_turn": "void @msl_turn(i32) memory(inaccessiblemem: readwrite)",
    "msl_within": "void @msl_within(ptr addrspace(2), ptr addrspace(2), i64, i32, i32)",
    "msl_array_access": "void @msl_array_access(ptr, i64, i32, i32)",
    "msl_array_copy": "void @msl_array_copy(ptr, ptr, i64)",
    "msl_work": "void @msl_work(i32, i32, i32, i32, i32) memory(inaccessiblemem: readwrite)",
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


def _type_text(text: str) -> str:
    """The type at the beginning of ``text``, as it is written."""
    if text[0] not in "[{<":
        return re.match(r"[^\s,]+", text)[0]  # type: ignore[index]
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "[{<(") - (c in "]}>)")
        if depth == 0:
            return text[: i + 1]
    return ""


def _keeps_rest(line: str, name: str) -> bool:
    """Whether ``line`` takes a vector only to change some of its components, before all of them are stored again."""
    name = re.escape(name)
    if re.search(rf"= insertelement <[^>]*> {name}, ", line):
        return True
    return bool(re.search(rf"= shufflevector <[^>]*> (?:{name}, <[^>]*> %|%\S+ <[^>]*> {name},)", line))


# What counts as work, and how often: flops, special functions, integers, conversions, choices.
_WORK = ((_ARITHMETIC, 1), (_FUSED, 2), (_SPECIAL, 1), (_INTEGER, 1), (_CONVERSION, 1), (_CHOICE, 1))
_KINDS = (0, 0, 1, 2, 3, 4)


class _Work:
    """Of one block, by kind."""

    def __init__(self) -> None:
        self.counts = [0] * (max(_KINDS) + 1)


class _Pass:
    def __init__(self, text: str, checked: bool, counting: bool) -> None:
        self.lines = text.split("\n")
        self.locations = _Locations(text)
        self.checked, self.counting = checked, counting
        self.used: set[str] = set()
        self.variables: dict[int, tuple[int, int]] = {}
        self.marks: dict[Site, int] = {}
        self.out: list[str] = []
        self.pointers = Pointers()
        self.loops: set[int] = set()
        self.blends: set[str] = set()
        self.objects = {name: _type_text(rest) for name, rest in _GLOBAL.findall(text)} if checked else {}
        # The arrays of threads that began without values; every kernel is one function by now.
        self.tracked = set(re.findall(r"call void @msl_array\(ptr (?:\w+ )*(%[^\s,]+)", text)) if checked else set()
        self.arrays = bool(self.tracked)

    def run(self) -> Instrumented:
        sites = sorted({s for s in map(self._site_of, self.lines) if s is not None})
        self.marks = {s: n for n, s in enumerate(sites)}
        work = _Work()
        for number, line in enumerate(self.lines):
            if line.startswith("define "):
                self._function(number)
            if self.counting:
                self._count(line, work)
            if number in self.loops:
                self._call("msl_turn", f"i32 {self.marks[self._site_of(line) or ()]}")
            self._line(line)
        body = "\n".join(self.out)
        for name in sorted(self.used):
            if f"@{name}(" not in "\n".join(x for x in self.out if x.startswith("declare")):
                body += f"\ndeclare {_DECLARATIONS[name]}"
        return Instrumented(body, sites, self.variables)

    def _function(self, begin: int) -> None:
        """Learn of a function where its loops turn, and in a checked kernel where its pointers come from.

        Every cycle has a jump to a block that stands at or before the one which it leaves.
        """
        self.pointers, self.blends = Pointers(), set()
        seen: set[str] = set()
        used: dict[str, list[str]] = {}
        terminator = begin
        for number in range(begin + 1, len(self.lines)):
            line = self.lines[number]
            if line == "}":
                break
            if label := _LABEL.match(line):
                seen.add(label[1])
            if _END_OF_BLOCK.match(line):
                terminator = number
            if "label %" in line and seen.intersection(_TARGET.findall(line)):
                self.loops.add(terminator)
            if self.checked:
                self.pointers.define(line)
            if self.arrays:
                for name in re.findall(r"%[\w.$-]+", line.partition(" = ")[2] or line):
                    used.setdefault(name, []).append(line)
        self.blends = {name for name, lines in used.items() if all(_keeps_rest(line, name) for line in lines)}

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
        elif self.arrays and (match := _THREAD.match(line)):
            self._thread(match, site)
        elif self.checked and (match := _BLOCK_COPY.search(line)):
            self._block(match, site)
        self.out.append(line)

    def _access(self, match: re.Match[str], site: int) -> None:
        _, write, value, space, pointer, align = match.groups()
        size, _ = _type_size(value)
        info = size | bool(write) << _WRITE | int(space) << _SPACE | (int(align).bit_length() - 1) << _ALIGN
        kind, name = self.pointers.base(pointer) or ("", "")
        if kind == "global":  # a constant of the program
            if self.objects.get(name):
                bytes_ = f"ptrtoint (ptr getelementptr ({self.objects[name]}, ptr null, i32 1) to i64)"
                place = f"ptr addrspace(2) {pointer}, ptr addrspace(2) {name}, i64 {bytes_}"
                self._call("msl_within", f"{place}, i32 {info}, i32 {site}")
            return
        if kind == "variable" and int(name) < _MOST_VARIABLES:
            info |= (int(name) + 1) << _OBJECT
        self._call(f"msl_access{space}", f"ptr addrspace({space}) {pointer}, i32 {info}, i32 {site}")

    def _thread(self, match: re.Match[str], site: int) -> None:
        """An access to thread memory, unless it is known to be no array that began without values."""
        loaded, value, pointer = match.groups()
        if loaded in self.blends or not self._may_be_array(pointer):
            return
        size, _ = _type_size(value)
        self._call("msl_array_access", f"ptr {pointer}, i64 {size}, i32 {int(loaded is None)}, i32 {site}")

    def _may_be_array(self, pointer: str) -> bool:
        kind, name = self.pointers.base(pointer) or ("", "")
        return not kind or (kind == "alloca" and name in self.tracked)

    def _block(self, match: re.Match[str], site: int) -> None:
        parts = operands(match[2])
        size = parts[2].split(" ", 1)[1].removeprefix("noundef ")
        pointers = [(parts[0], True)] + ([(parts[1], False)] if match[1] != "set" else [])
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
        if self.arrays:
            self._thread_block([operand for operand, _ in pointers], size, site)

    def _thread_block(self, pointers: list[str], size: str, site: int) -> None:
        """The part of a copy that is in thread memory; ``pointers`` are where it goes to, and where it comes from."""
        names = [p.split(" ")[-1] for p in pointers]
        inside = [
            p.startswith("ptr ") and "addrspace" not in p and n[0] == "%" for p, n in zip(pointers, names, strict=True)
        ]
        mine = [i and self._may_be_array(n) for i, n in zip(inside, names, strict=True)]
        if all(inside) and len(names) == 2 and any(mine):
            self._call("msl_array_copy", f"ptr {names[0]}, ptr {names[1]}, i64 {size}")
        else:
            for name, tracked, write in zip(names, mine, (1, 0), strict=False):
                if tracked:
                    self._call("msl_array_access", f"ptr {name}, i64 {size}, i32 {write}, i32 {site}")

    def _count(self, line: str, work: _Work) -> None:
        """Adds to what the block does; where it ends, it is told to the machine."""
        if _END_OF_BLOCK.match(line):
            if any(work.counts):
                self._call("msl_work", ", ".join(f"i32 {n}" for n in work.counts))
            work.counts = [0] * len(work.counts)
            return
        for kind, (pattern, each) in enumerate(_WORK):
            if match := pattern.search(line):
                work.counts[_KINDS[kind]] += each * int(next((g for g in match.groups() if g), 1))
                return


def instrument(text: str, checked: bool, counting: bool) -> Instrumented:
    """The kernel with its calls into the machine; ``text`` is optimised IR with line tables."""
    return _Pass(text, checked, counting).run()
