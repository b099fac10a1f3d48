"""What a result depends on, as a short hash: sources without comments and docstrings, and what these import.

Compiled kernels are named by such a digest and evidence is kept under one, so that both outlive an edit of a comment
and neither outlives an edit of the code. What every call passes through alike (``core/`` and the runtimes) is left
out: it has tests of its own, and with it no digest would ever stay.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

from torch_attnkit import paths

_PACKAGE = "torch_attnkit"
_ROOT = Path(__file__).resolve().parent
_LENGTH = 24  # hexadecimal digits: 96 bits
_SHARED = tuple(
    f"{_PACKAGE}.{name}"
    for name in ("backends", "core", "cuda.compile", "cuda.driver", "digest", "mps.library", "paths", "sim")
)
# Folders of architectures, and the architectures whose kernels are there.
_ARCHS = {"sm80": ("sm80", "sm89", "sm120"), "sm90": ("sm90",), "sm100": ("sm100",), "sm120": ("sm120",)}
_Definition = tuple[str, str]  # a module, and a name there
_meanings: dict[_Definition, str] = {}
_open: set[_Definition] = set()  # of the circles that what is being read belongs to, what has not ended yet
# Fields that a newer Python adds to a tree, or that say how something was written and not what it means.
_NO_MEANING = {"ctx", "kind", "type_comment", "type_params"}
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.S)
_TARGET = re.compile(r"sm_?(\d+)[af]?")
_TARGET_LINE = re.compile(r'^\{"sm_(\d+)", .*\},$\n?', re.M)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+[<"](attnkit/[\w./-]+)[>"]', re.M)


def of(*parts: str) -> str:
    """The digest of texts, in order."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_LENGTH]


@functools.cache
def of_modules(*names: str, arch: str = "") -> str:
    """The digest of modules of this package and of all that they import or name, from this package.

    A string that is the name of a module counts as an import of it; one whose place is left open ("...{arch}.decode")
    stands for every module that fits. With ``arch``, what belongs to another one is left out, unless a module that
    belongs to one, too, imports it.
    """
    return of(*(f"{name}\n{_meaning(name)}" for name in sorted(reach(*names, arch=arch))))


def reach(*names: str, arch: str = "") -> set[str]:
    """The modules that ``of_modules`` is the digest of. Of a function, ``module:function``, it is what that uses."""
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name, _, function = todo.pop().partition(":")
        if name not in seen:
            seen.add(name)
            uses, named = _of_function(name, function) if function else (_uses(name), _named(name))
            todo += [n for n in uses if _counts(n, name, arch)]
            todo += [n for n in named if not _is_shared(n) and not _belongs_elsewhere(n, arch)]
    return seen


@functools.cache
def of_definitions(module: str, *names: str, arch: str = "") -> str:
    """The digest of some definitions of a module, of those that they use there, and of the modules that these use."""
    found, used = _definitions(module), _used(module, *names)
    kept = sorted({m for name, m in _imports(module) if name in used and _counts(m, module, arch)})
    return of(*(_canonical(found[n]) for n in sorted(used) if n in found), of_modules(*kept, arch=arch))


@functools.cache
def of_meaning(module: str, *names: str) -> str:
    """The digest of some definitions of a module by what they do: whatever they, and what they use, are called.

    Each definition of this package that is used stands for itself by its own digest, wherever it is; what ``core`` and
    the runtimes define, and what recurs, by its name. Types that annotate count for nothing.
    """
    return of(*(_meaning_of(module, name) for name in names))


@functools.cache
def of_metal(op: str) -> str:
    """The digest of an op's Metal source with the headers that it includes."""
    files, todo = {}, [paths.metal_source(op)]
    while todo:
        path = todo.pop()
        if path not in files:
            files[path] = path.read_text(encoding="ascii")
            todo += [paths.metal_include() / name for name in _INCLUDE.findall(files[path])]
    return of(*(f"{path.name}\n{_without_comments(files[path])}" for path in sorted(files)))


@functools.cache
def of_cpu() -> str:
    """The digest of the CPU's kernels in C++."""
    files = sorted(p for p in (paths.csrc() / "cpu").glob("*") if p.suffix in (".cpp", ".h"))
    return of(*(f"{path.name}\n{_without_comments(path.read_text(encoding='ascii'))}" for path in files))


@functools.cache
def of_simulator(name: str, arch: str = "") -> str:
    """The digest of a simulator, ``metal`` or ``ptx``: its Python and its C++.

    With ``arch``, what tables say of other targets is left out: entries of dicts in Python, lines of C++.
    """
    home = paths.csrc() / "sim"
    cpp = sorted(p for f in home.glob(f"{name}*") for p in f.rglob("*") if p.suffix in (".cpp", ".h"))
    # By path: files of one name in several rooms (lanes, machine's and the checker's) are told apart.
    texts = (
        f"{path.relative_to(home).as_posix()}\n{_for_target(_without_comments(path.read_text()), arch)}" for path in cpp
    )
    modules = (m for m in sorted(_modules()) if m.startswith(f"{_PACKAGE}.sim.{name}"))
    tables = _OfTarget(arch)
    return of(*(_canonical(tables.visit(copy.deepcopy(_tree(m)))) for m in modules), *texts)


class _OfTarget(ast.NodeTransformer):
    """Leaves the entries of other targets out of dicts whose keys are targets, ``sm90`` or ``sm_90a``."""

    def __init__(self, arch: str):
        self.arch = arch

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        named = (k.value if isinstance(k, ast.Constant) else None for k in node.keys)
        kept = [i for i, key in enumerate(named) if not isinstance(key, str) or self._counts(key)]
        entries = ast.Dict([node.keys[i] for i in kept], [node.values[i] for i in kept])
        return self.generic_visit(entries)

    def _counts(self, key: str) -> bool:
        target = _TARGET.fullmatch(key)
        return not (self.arch and target) or f"sm{target[1]}" == self.arch


def _for_target(text: str, arch: str) -> str:
    """C++ text without the lines of tables that are of other targets."""
    return _TARGET_LINE.sub(lambda line: line[0] if arch in ("", f"sm{line[1]}") else "", text)


@functools.cache
def _definitions(module: str) -> dict[str, ast.stmt]:
    return {name: node for node in _tree(module).body for name in _defined(node)}


def _used(module: str, *names: str) -> set[str]:
    """Names that definitions of a module use, those of the definitions too that they use there."""
    found, todo, used = _definitions(module), list(names), set()
    while todo:
        name = todo.pop()
        if name not in used:
            used.add(name)
            todo += [n.id for n in ast.walk(found[name]) if isinstance(n, ast.Name)] if name in found else []
    return used


@functools.cache
def _of_function(module: str, function: str) -> tuple[set[str], tuple[str, ...]]:
    """The modules that a function of a module uses, and those that strings in it name."""
    used = _used(module, function)
    nodes = [_definitions(module)[name] for name in sorted(used) if name in _definitions(module)]
    return {m for name, m in _imports(module) if name in used}, _named_in(*nodes)


def _meaning_of(module: str, name: str, users: tuple[_Definition, ...] = ()) -> str:
    """The digest of what a name of a module stands for; a user of it, met again, stands for itself by its place."""
    found = _resolved(module, name)
    if found is None or _is_shared(found[0]):
        return name
    if found in users:
        _open.add(found)
        return f"user {len(users) - users.index(found)}"
    if found not in _meanings:
        module, name = found
        known = {*_definitions(module), *dict(_imported(module))}
        node = _Named(known, lambda n: _meaning_of(module, n, (*users, found)))
        text = _canonical(node.visit(copy.deepcopy(_definitions(module)[name]))).replace(repr(name), "itself")
        again = found in _open
        _open.discard(found)
        if again or _open:  # of a circle, which looks another way from elsewhere
            return of(text)
        _meanings[found] = of(text)
    return _meanings[found]


def _resolved(module: str, name: str) -> _Definition | None:
    """The module and the name there of a definition, or of one in a module that is imported: ``rules.HEADS``."""
    first, _, rest = name.partition(".")
    if first in _definitions(module):
        return module, first
    origin = dict(_imported(module)).get(first, "")
    if origin in _modules():
        return _resolved(origin, rest) if rest else None
    home, _, inner = origin.rpartition(".")
    return _resolved(home, inner) if home in _modules() else None


class _Named(ast.NodeTransformer):
    """Puts what a name stands for in its place, and leaves annotations out."""

    def __init__(self, known: Container[str], meaning: Callable[[str], str]):
        self.known, self.meaning = known, meaning

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.meaning(node.id), node.ctx) if node.id in self.known else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.known:
            name = f"{node.value.id}.{node.attr}"
            if (found := self.meaning(name)) != name:
                return ast.Name(found, node.ctx)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Name("annotation", ast.Load())
        return self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = _function


@functools.cache
def _modules() -> dict[str, Path]:
    """Every module of the package by name; a package is its ``__init__``."""
    found = {}
    for path in _ROOT.rglob("*.py"):
        parts = (_PACKAGE, *path.relative_to(_ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def _tree(module: str) -> ast.Module:
    if module not in _modules():
        raise ValueError(f"there is no module {module}")
    return ast.parse(_modules()[module].read_text(encoding="utf-8"))


@functools.cache
def _meaning(module: str) -> str:
    return _canonical(_tree(module))


def _canonical(node: object) -> str:
    """A syntax tree as text, the same for every Python that parses it alike, without docstrings and places."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NO_MEANING)
        inner = (f"{name}={_canonical(_without_docstring(node, name, value))}" for name, value in fields)
        return f"{type(node).__name__}({','.join(inner)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def _without_docstring(node: ast.AST, field: str, value: object) -> object:
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if field == "body" and documented and isinstance(value, list) and value and _is_text(value[0]):
        return value[1:]
    return value


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return (n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name))


@functools.cache
def _imported(module: str) -> tuple[tuple[str, str], ...]:
    """(name, what it is by its full name) of all that ``module`` imports anywhere in its text."""
    tree, found = _tree(module), []
    here = module.split(".") if _modules()[module].name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(a.asname or a.name.split(".")[0], a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found += [(a.asname or a.name, f"{base}.{a.name}") for a in node.names]
    return tuple(found)


def _imports(module: str) -> Iterator[tuple[str, str]]:
    """(name, module of the package that it is, or comes from) of all that ``module`` imports anywhere in its text."""
    for name, origin in _imported(module):
        home = origin if origin in _modules() else origin.rpartition(".")[0]
        if home in _modules():
            yield name, home


def _uses(module: str) -> set[str]:
    return {n for _, n in _imports(module)}


@functools.cache
def _named(module: str) -> tuple[str, ...]:
    return _named_in(_tree(module))


def _named_in(*trees: ast.AST) -> tuple[str, ...]:
    """The modules that a string of ``trees`` names; the open places of an f-string fit one part of a name."""
    return tuple(
        name
        for tree in trees
        for node in ast.walk(tree)
        for pattern in _pattern(node)
        for name in _modules()
        if name != _PACKAGE and re.fullmatch(pattern, name)
    )


def _pattern(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{_PACKAGE}."):
        yield re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\w+" for p in node.values]
        if parts and parts[0].startswith(re.escape(f"{_PACKAGE}.")):
            yield "".join(parts)


def _is_shared(module: str) -> bool:
    return any(module == shared or module.startswith(f"{shared}.") for shared in _SHARED)


def _belongs_elsewhere(module: str, arch: str) -> bool:
    return bool(arch) and any(part in module.split(".") for part, archs in _ARCHS.items() if arch not in archs)


def _counts(module: str, importer: str, arch: str) -> bool:
    """Whether a module that ``importer`` imports counts for ``arch``: what an architecture takes from another does."""
    return not _is_shared(module) and (
        any(part in importer.split(".") for part in _ARCHS) or not _belongs_elsewhere(module, arch)
    )


def _without_comments(text: str) -> str:
    """C++ or Metal text without comments; runs of blanks and empty lines count as one."""
    bare = _COMMENT.sub(lambda m: m[1] or " ", text)
    return "\n".join(filter(None, (" ".join(line.split()) for line in bare.splitlines())))
