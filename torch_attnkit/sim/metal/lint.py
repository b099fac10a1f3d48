"""What Apple's compiler refuses and clang's C++ does not, so that a source is known to be Metal before a Mac sees it.

The rules come from the Metal Shading Language Specification; what no rule covers may still be refused by Apple.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import compiler, forbidden, source
from .tokens import after, before, closing, is_blank, line_of, tokens

VERSIONS = (310, 320, 400)  # macOS 14, 15 and 26, as torch.mps chooses
_C17, _LAMBDA = 400, 320  # the versions that brought C++17 and lambdas
_TEXTURE = re.compile(r"(texture(1d|2d|3d|cube|_buffer)\w*|depth2d\w*|sampler|imageblock|visible_function_table)$")
_SPACES = {"device", "constant", "threadgroup", "thread", "threadgroup_imageblock", "ray_data", "object_data"}
_STANDARD_TYPES = {*source.SCALARS, *source.VECTORS, "size_t", "ptrdiff_t", "void"} | {
    f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)
}
_GRID_TYPE = re.compile(r"(?:const )?(?:uint|ushort)[23]? ")


@dataclass(frozen=True, order=True)
class Finding:
    line: int
    message: str

    def __str__(self) -> str:
        return f"program_source:{self.line}: {self.message}"


class _Linter:
    def __init__(self, text: str, version: int) -> None:
        self.ts, self.version = tokens(text), version
        self.types = _STANDARD_TYPES | set(re.findall(r"\b(?:typename|class|struct)\s+(\w+)", text))
        self.types |= set(re.findall(r"\busing\s+(\w+)\s*=", text)) | set(
            re.findall(r"\btypedef\b[^;]*?(\w+)\s*;", text)
        )

    def run(self) -> Iterator[Finding]:
        for i, message in self._all():
            yield Finding(line_of(self.ts, i), message)

    def _all(self) -> Iterator[tuple[int, str]]:
        functions: list[bool] = []
        for i, t in enumerate(self.ts):
            if is_blank(t):
                continue
            if t == "{":
                functions.append(self._is_body(i) or any(functions))
            elif t == "}" and functions:
                functions.pop()
            yield from ((i, m) for m in self._word(i, t))
            if t == "static" and any(functions):
                yield i, "Metal has no static local variables"
            if t in ("*", "&"):
                yield from self._pointer(i)
            if t == "[" and self.version < _LAMBDA and self._is_lambda(i):
                yield i, f"lambdas need Metal 3.2, this is checked for {self.version // 100}.{self.version // 10 % 10}"

    def _is_body(self, i: int) -> bool:
        return self.ts[before(self.ts, i)] in (")", "const", "else", "do", "noexcept")

    def _word(self, i: int, t: str) -> Iterator[str]:
        following = self.ts[after(self.ts, i)] if after(self.ts, i) < len(self.ts) else ""
        previous = self.ts[before(self.ts, i)] if before(self.ts, i) >= 0 else ""
        if said := forbidden.word(t, previous, following):
            yield said
        elif t.startswith("__builtin_"):
            yield f"{t}: a builtin of the host's compiler"
        elif _TEXTURE.match(t):
            yield f"{t}: compile_shader binds buffers only"
        elif t == "auto" and following == "[" and self.version < _C17:
            yield "structured bindings need Metal 4 (C++17)"
        elif t == "wchar_t" or t in ("char16_t", "char32_t"):
            yield f"{t}: Metal has no such type"

    def _is_lambda(self, i: int) -> bool:
        previous = self.ts[before(self.ts, i)]
        if re.match(r"\w", previous[-1:]) and previous != "return" or previous in (")", "]", "[", ">"):
            return False
        if self.ts[i + 1] == "[":
            return False
        return self.ts[after(self.ts, closing(self.ts, i))] in ("(", "{")

    def _pointer(self, i: int) -> Iterator[tuple[int, str]]:
        """A declared pointer or reference must name the address space that it points to."""
        ts = self.ts
        if ts[before(ts, i)] not in self.types:
            return
        k, words = before(ts, i), set()
        while k >= 0 and ts[k] not in (";", "{", "}", "(", ",", "<", ")", "=", "return", ">") and ts[k][0] != "#":
            words.add(ts[k])
            k = before(ts, k)
        if words & _SPACES or "operator" in words or (ts[k] == "(" and ts[before(ts, k)] in ("sizeof", "alignof")):
            return
        name = after(ts, i)
        declares = re.match(r"[A-Za-z_]", ts[name]) and ts[after(ts, name)] in (",", ")", "=", ";", "[")
        if declares or ts[name] in (",", ")", ">"):
            kind = "pointer" if ts[i] == "*" else "reference"
            yield i, f"{kind} type must have explicit address space qualifier"


def _parameters(unit: source.Unit, lines: Sequence[str]) -> Iterator[Finding]:
    """Rules on kernel parameters, at the line where the kernel's name stands."""
    for d in unit.declarations.values():
        line = next((n for n, text in enumerate(lines, 1) if re.search(rf"\b{d.name}\s*\(", text)), 0)
        seen: set[int] = set()
        for p in d.parameters:
            if p.slot < 100:
                if p.slot > 30:
                    yield Finding(line, f"{d.name}: buffer({p.slot}): the index must be 0 to 30")
                if p.slot in seen:
                    yield Finding(line, f"{d.name}: buffer({p.slot}) is bound twice")
                seen.add(p.slot)
                if not re.search(r"\b(device|constant)\b", p.text):
                    yield Finding(line, f"{d.name}: {p.text}: a buffer must be in device or constant memory")
            elif not _GRID_TYPE.match(p.text):
                yield Finding(line, f"{d.name}: {p.text}: a grid value is uint or ushort, or a vector of them")
        vectors = {
            m[1]
            for p in d.parameters
            if (m := re.match(r"(?:const )?u(?:int|short)([23]?) ", p.text)) and 100 <= p.slot <= 102
        }
        if len(vectors) > 1:
            yield Finding(line, f"{d.name}: positions must be all scalars or all vectors of one size")


def lint(text: str, versions: Sequence[int] = VERSIONS) -> list[Finding]:
    """What is known to keep ``text`` from compiling with Metal 3.1, 3.2 and 4.0, or the ``versions`` given."""
    found: set[Finding] = set()
    try:
        text = compiler.embed(text)
    except SyntaxError as error:
        return sorted(_said(error))
    uses = re.search(r"\bmetal\s*::|using\s+namespace\s+metal\b", re.sub(r"//[^\n]*", "", text))
    if uses and not re.search(r"#\s*include\s*<metal_\w+>", text):
        found.add(Finding(text.count("\n", 0, uses.start()) + 1, "#include <metal_stdlib> is missing"))
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for part in _one(text, version, Path(folder)):
                    found |= set(part)
            except SyntaxError as error:
                found |= _said(error)
    return sorted(found)


def _said(error: SyntaxError) -> set[Finding]:
    """The compiler's errors."""
    said = re.findall(r"^program_source:(\d+)(?::\d+)?: (?:fatal )?error: (.*)", str(error), re.M)
    return {Finding(int(line), message) for line, message in said} or {Finding(0, str(error))}


def _one(text: str, version: int, work: Path) -> Iterator[Iterator[Finding]]:
    """Findings of one stage after another, because a stage that raises ends it."""
    preprocessed = compiler.preprocess(text, version, work)
    yield _Linter(preprocessed, version).run()
    yield _parameters(source.rewrite(preprocessed), text.split("\n"))
    unit = compiler.translate(preprocessed, work)
    ir = compiler.front_end(unit, version, work)
    yield (Finding(0, m) for m in forbidden.in_program(ir))
