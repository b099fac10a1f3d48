"""The rules of CONTRIBUTING.md that a program can check: functions from {path: text} to violations."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("torch_attnkit", "csrc", "tests", "bench", "examples")
SUFFIXES = (".py", ".cpp", ".h", ".metal")
TOOLKITS = ("core", "formats", "oracle", "mps", "cuda", "cpu", "sim")
FAMILIES = "torch_attnkit/kernels/"
MAX_FILE, MAX_FUNCTION, MAX_TRACED, MAX_ARGUMENTS, WINDOW = 600, 100, 150, 12, 8
MARK = "todo".upper()  # so that this file may stand under its own rule
# Parts of names that say nothing, or several things, to who knows the field; what they stood for here, in its words.
WORDS = {
    "abreast": "at a time",
    "anew opaque": "compiler_barrier",
    "bring brings brought": "load",
    "came come": "arrived, is_last_cta",
    "draw drawn draws undrawn": "sample, generate, dynamic (scheduling)",
    "gave give gives hand": "send, release",
    "house room": "buffer, capacity, limits, scratch, tolerance",
    "inbox": "receive buffer, mailbox",
    "delivery": "shared dequantisation",
    "joining": "atomics",
    "lift": "p_scale",
    "meet meeting met": "barrier, sync; covered",
    "mend mended": "fixed, regression",
    "mine": "local, ours",
    "note tell told": "work_tile_info, record, scored",
    "numbers": "scalars, elements, values, dense",
    "once": "single_pass, single_stage, evict_first, unique",
    "place placed places": "slot, stage, offset, position, target, layout",
    "said say says": "message, output, config, reason; log",
    "seam seams": "runtime",
    "stay stays": "(leave it out)",
    "there": "valid, present",
    "together": "concurrent, cooperative, all_features",
    "turn turned turning turns": "transpose, rotate, ping_pong, interleave, iteration",
    "unplaced": "zero_fill",
    "unseen": "masked, fully_masked",
}
# Words of formats that say nothing in the name of a file of a kernel or of its test.
FILE_WORDS = {"coded codes": "fp8, fp4, quantised", "halves wide": "hdim512", "multi": "pack_gqa"}
# Sources whose every name counts for evidence (``parity/evidence.py``): a new one takes another run of each simulator,
# and of the devices. ``unseen`` is a key of the shapes too.
KEPT = {
    "torch_attnkit/sim/*": "mine note notes numbers place placed places said stays turns",
    "tests/sim/*": "note notes turns",  # reports of the simulators and their settings
    "torch_attnkit/oracle/checks.py": "place",
    "torch_attnkit/oracle/inputs.py": "unseen",
    "torch_attnkit/oracle/tensor_cores.py": "numbers place places",
    "torch_attnkit/formats/rope.py": "turned",
    "torch_attnkit/ops/*/cases.py": "unseen",
    "torch_attnkit/ops/*/reference.py": "numbers place turned unseen",
    "torch_attnkit/core/dispatch.py": "room",  # as csrc/dispatch has it
    "torch_attnkit/cuda/repeat.py": "place room",
    "torch_attnkit/integrations/flash_attn_4.py": "once",  # once_differentiable of PyTorch
}
Files = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
parse = cache(ast.parse)


def nodes(files: Files, kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path, text in files.items():
        if path.endswith(".py"):
            yield from ((path, n) for n in ast.walk(parse(text)) if isinstance(n, kind))


def imports(path: str, text: str) -> Iterator[str]:
    """Every module that a file imports, relative names resolved; ``from a import b`` counts as a.b."""
    here = path.removesuffix(".py").split("/")
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*(here[: -node.level] if node.level else ()), *([node.module] if node.module else ())]
            yield from (".".join([*base, a.name]) for a in node.names)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def code_lines(text: str) -> list[str]:
    """Lines without comments, docstrings, imports, signatures and lone brackets."""
    drop: set[int] = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            drop |= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, Function):
            drop |= set(range(node.lineno, node.body[0].lineno))
    lines = (line.split("  # ")[0].strip() for i, line in enumerate(text.splitlines(), 1) if i not in drop)
    return [s for s in lines if re.search(r"\w", s) and not s.startswith("#")]


def cpp_lines(text: str) -> list[str]:
    """The same of C++ and Metal, where signatures count."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [s for s in lines if re.search(r"\w", s) and not s.startswith("#include")]


def files_are_short(files: Files) -> Iterator[str]:
    for path, text in files.items():
        if (n := len(text.splitlines())) > MAX_FILE:
            yield f"{path}: {n} lines, at most {MAX_FILE}"


def functions_are_short(files: Files) -> Iterator[str]:
    """A function that CuTeDSL traces may be longer: a device function is one scope."""
    for path, f in nodes(files, Function):
        traced = any(re.match(r"cute\.(kernel|jit)", ast.unparse(d)) for d in f.decorator_list)
        if (n := f.end_lineno - f.lineno + 1) > (limit := MAX_TRACED if traced else MAX_FUNCTION):
            yield f"{path}:{f.lineno}: {f.name} has {n} lines, at most {limit}"


def functions_take_few_arguments(files: Files) -> Iterator[str]:
    """Exempt: ``reference`` and ``operands`` in ops/, whose arguments are the op's schema."""
    for path, f in nodes(files, Function):
        n = len(f.args.posonlyargs) + len(f.args.args) + len(f.args.kwonlyargs)
        schema = path.startswith("torch_attnkit/ops/") and f.name in ("reference", "operands")
        if n > MAX_ARGUMENTS and not schema:
            yield f"{path}:{f.lineno}: {f.name} takes {n} arguments, at most {MAX_ARGUMENTS}"


def nothing_is_copied(files: Files) -> Iterator[str]:
    """No run of WINDOW equal lines in the package and in csrc, be it in two files or twice in one. Left out as idiom:

    - imports and #include, which say what a file uses;
    - signatures: a traced kernel lists the tensors of its launch, a reference has the op's schema, and what the table
      calls (``build``, ``make``, ``bytes``) has one form; ``functions_take_few_arguments`` bounds their length;
    - ``op.py``, which is data: the schemas and dims of attention ops are alike, as these ops are.
    """
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    reported: set[tuple[str, str]] = set()
    for path, text in files.items():
        if not path.startswith(("torch_attnkit/", "csrc/")) or path.endswith("/op.py"):
            continue
        lines = code_lines(text) if path.endswith(".py") else cpp_lines(text)
        for i in range(len(lines) - WINDOW + 1):
            other, first = seen.setdefault(tuple(lines[i : i + WINDOW]), (path, i))
            if (other, first) != (path, i) and (other, path) not in reported:
                reported.add((other, path))
                yield f"{path} repeats {WINDOW} lines of {other}, from {lines[i]!r} on"


def the_environment_is_read_in_config(files: Files) -> Iterator[str]:
    for path, text in files.items():
        if path.startswith(("torch_attnkit/", "csrc/")) and path != "torch_attnkit/core/config.py":
            for match in re.finditer(r"\b(environb?|getenvb?)\b", text):
                yield f"{path}: {match[0]} outside core/config.py"


def names_describe_contents(files: Files) -> Iterator[str]:
    for path in files:
        if re.fullmatch(r"(.*_)?(utils?|common|helpers?|misc|v2)", Path(path).stem):
            yield f"{path}: the name does not say what the file is about"


def _parts(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of all that is named; a test function is named by a sentence."""
    for n in ast.walk(tree):
        if isinstance(n, ast.Name):
            yield n.lineno, n.id
        elif isinstance(n, ast.Attribute):
            yield n.lineno, n.attr
        elif isinstance(n, ast.arg | ast.keyword):
            yield n.lineno, n.arg or ""
        elif isinstance(n, Function | ast.ClassDef) and not n.name.startswith("test_"):
            yield n.lineno, n.name
        elif isinstance(n, ast.alias) and n.asname:
            yield n.lineno, n.asname


def _called(tree: ast.AST) -> set[str]:
    """Parameters of the methods ``__call__``: TVM-FFI puts those of a kernel's entry into the texts of its errors, and
    so into the fingerprint of the compiled kernel, which a new name would cost its evidence."""
    calls = [n.args for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__call__"]
    return {a.arg for args in calls for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def names_are_the_fields(files: Files) -> Iterator[str]:
    """No word of WORDS in a name, and none of FILE_WORDS in that of a file of a kernel. Exempt: ``_called``."""
    words = {word: field for group, field in WORDS.items() for word in group.split()}
    of_files = {word: field for group, field in FILE_WORDS.items() for word in group.split()}
    for path, text in files.items():
        if not path.endswith(".py"):
            continue
        kept = {word for pattern, group in KEPT.items() if fnmatch(path, pattern) for word in group.split()}
        known = words | (of_files if "kernels/" in path or path.startswith("tests/ops/") else {})
        stem = Path(path).stem.replace("sdpa_multi", "")
        found = [(0, word) for word in sorted(_parts(stem) & known.keys())]
        called = _called(parse(text))
        names = [(line, name) for line, name in _names(parse(text)) if name not in called]
        found += [(line, w) for line, name in names for w in sorted(_parts(name) & words.keys() - kept)]
        yield from (f"{path}:{line}: {word!r} in a name, the field says: {known[word]}" for line, word in found)


def class_names_are_unique(files: Files) -> Iterator[str]:
    """In a family's files of one architecture, or of none."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, node in nodes(files, ast.ClassDef):
        if path.startswith(FAMILIES):
            found[Path(path).parent.as_posix(), node.name].append(path)
    for (_, name), paths in found.items():
        if len(paths) > 1:
            yield f"{', '.join(paths)}: {name} is the name of {len(paths)} classes"


def metal_is_ascii(files: Files) -> Iterator[str]:
    for path, text in files.items():
        if path.startswith("csrc/metal/") and not text.isascii():
            yield f"{path}: not ASCII: {next(c for c in text if not c.isascii())!r}"


def todos_name_their_end(files: Files) -> Iterator[str]:
    pattern = re.compile(rf"\b{MARK}\b(?!\((version|issue|measurement) [^)\s][^)]*\))")
    for path, text in files.items():
        if pattern.search(text):
            yield f"{path}: {MARK} without (version ...), (issue ...) or (measurement ...)"


def _of_package(files: Files) -> Iterator[tuple[str, str, str]]:
    """(path, folder of the package, module) of everything that the package's files import from the package."""
    for path, text in files.items():
        if path.startswith("torch_attnkit/") and path.endswith(".py"):
            folder = path.split("/")[1]
            yield from ((path, folder, m) for m in imports(path, text) if inside(m, "torch_attnkit"))


def toolkits_know_no_op_and_no_family(files: Files) -> Iterator[str]:
    above = ("torch_attnkit.ops", "torch_attnkit.kernels", "torch_attnkit.integrations")
    for path, folder, module in _of_package(files):
        if folder in TOOLKITS and any(inside(module, a) for a in above):
            yield f"{path}: a toolkit imports {module}"


def families_know_no_op_and_no_call(files: Files) -> Iterator[str]:
    for path, folder, module in _of_package(files):
        if folder == "kernels" and (inside(module, "torch_attnkit.ops") or module.endswith((".Call", ".Op"))):
            yield f"{path}: a family imports {module}"


def core_imports_nothing_of_ours(files: Files) -> Iterator[str]:
    for path, folder, module in _of_package(files):
        if folder == "core" and not inside(module, "torch_attnkit.core"):
            yield f"{path}: core imports {module}"
    for path, text in files.items():
        if path.startswith("torch_attnkit/core/") and path.endswith(".py"):
            for module in imports(path, text):
                if any(inside(module, b) for b in ("cutlass", "torch.mps", "Metal")):
                    yield f"{path}: core imports {module}"


def nothing_imports_in_a_circle(files: Files) -> Iterator[str]:
    """Modules of the package by what they import when they are imported; an import inside a function is none."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    uses: dict[str, set[str]] = {}
    for name, path in names.items():
        if path.startswith("torch_attnkit/") and path.endswith(".py"):
            top = ast.Module([n for n in parse(files[path]).body if isinstance(n, ast.Import | ast.ImportFrom)], [])
            found = set()
            for module in imports(path, ast.unparse(top)):
                found.add(module if module in names else module.rpartition(".")[0])
            uses[name] = {m for m in found if m in names} - {name}
    done: set[str] = set()
    for start in uses:
        stack = [(start, iter(sorted(uses[start])))] if start not in done else []
        while stack:
            name, rest = stack[-1]
            child = next(rest, None)
            if child is None:
                done.add(name)
                stack.pop()
            elif any(child == on for on, _ in stack):
                yield f"{names[name]}: imports {child}, which imports it"
            elif child not in done:
                stack.append((child, iter(sorted(uses.get(child, ())))))


def lines(n: int, indent: str = "", stem: str = "x") -> str:
    return "".join(f"{indent}{stem}{i} = {i}\n" for i in range(n))


def takes(n: int, name: str) -> str:
    return f"def {name}({', '.join(f'a{i}' for i in range(n))}): ...\n"


WRONG = [
    (files_are_short, {"csrc/metal/a.metal": "\n" * 601}),
    (functions_are_short, {"a.py": "def f():\n" + lines(100, " ")}),
    (functions_are_short, {"a.py": "@cute.kernel\ndef f():\n" + lines(150, " ")}),
    (functions_take_few_arguments, {"torch_attnkit/ops/a/mps.py": takes(13, "build")}),
    (functions_take_few_arguments, {"torch_attnkit/mps/launch.py": takes(13, "launch")}),
    (
        nothing_is_copied,
        {"torch_attnkit/a.py": lines(8), "torch_attnkit/b.py": "z = 1\n\n# why\n" + lines(8)},
    ),
    (nothing_is_copied, {"torch_attnkit/a.py": lines(8) + "def f():\n" + lines(8, "    ")}),
    (nothing_is_copied, {"csrc/a.h": lines(8), "csrc/b.cpp": lines(8).replace("x4", "}  // why\nx4")}),
    (the_environment_is_read_in_config, {"torch_attnkit/a.py": "import os\nos.environ['A']\n"}),
    (the_environment_is_read_in_config, {"csrc/sim/ptx/a.cpp": 'getenv("A");\n'}),
    (names_describe_contents, {"torch_attnkit/mps/utils.py": ""}),
    (names_describe_contents, {"csrc/metal/include/attnkit/common.h": ""}),
    (names_describe_contents, {"torch_attnkit/mps/softmax_v2.py": ""}),
    (names_are_the_fields, {"torch_attnkit/cuda/a.py": "def f(row_numbers): ...\n"}),
    (names_are_the_fields, {"bench/a.py": "class TurnedValues: ...\n"}),
    (names_are_the_fields, {"tests/core/a.py": "import a as seams\n"}),
    (names_are_the_fields, {"torch_attnkit/parity/places.py": ""}),
    (names_are_the_fields, {f"{FAMILIES}norm/sm90/codes.py": "codes = 1\n"}),
    (class_names_are_unique, {f"{FAMILIES}norm/sm90/{name}.py": "class Config: ...\n" for name in "ab"}),
    (metal_is_ascii, {"csrc/metal/a.metal": "// 2 \N{MULTIPLICATION SIGN} 2\n"}),
    (todos_name_their_end, {"a.py": f"# {MARK}: faster\n"}),
    (toolkits_know_no_op_and_no_family, {"torch_attnkit/mps/a.py": "from torch_attnkit import ops\n"}),
    (toolkits_know_no_op_and_no_family, {"torch_attnkit/cuda/a.py": "from ..kernels.decode import plan\n"}),
    (families_know_no_op_and_no_call, {f"{FAMILIES}a/plan.py": "from torch_attnkit.ops.sdpa_decode import op\n"}),
    (families_know_no_op_and_no_call, {f"{FAMILIES}a/plan.py": "from torch_attnkit.core.op import Call\n"}),
    (core_imports_nothing_of_ours, {"torch_attnkit/core/a.py": "def f():\n    import cutlass.cute as cute\n"}),
    (core_imports_nothing_of_ours, {"torch_attnkit/core/a.py": "from ..mps.library import compile\n"}),
    (
        nothing_imports_in_a_circle,
        {"torch_attnkit/a.py": "from . import b\n", "torch_attnkit/b.py": "from .a import x\n"},
    ),
]
RIGHT = [
    (functions_are_short, {"a.py": "@cute.jit(a=1)\ndef f():\n" + lines(149, " ")}),
    (functions_take_few_arguments, {"torch_attnkit/ops/a/reference.py": takes(17, "reference")}),
    (nothing_is_copied, {"torch_attnkit/a.py": lines(7), "torch_attnkit/b.py": lines(7)}),
    (nothing_is_copied, {"torch_attnkit/ops/a/op.py": lines(9), "torch_attnkit/ops/b/op.py": lines(9)}),
    (nothing_is_copied, {f"torch_attnkit/{name}.py": "from . import (\n" + "    x,\n" * 9 + ")\n" for name in "ab"}),
    (nothing_is_copied, {f"torch_attnkit/{name}.py": "def f(\n" + "    x,\n" * 9 + "): ...\n" for name in "ab"}),
    (nothing_is_copied, {f"csrc/{name}.h": "".join(f'#include "{i}"\n' for i in range(9)) for name in "ab"}),
    (names_describe_contents, {"torch_attnkit/demo/deepseek_v4.py": "", "torch_attnkit/__init__.py": ""}),
    (
        names_are_the_fields,
        {"tests/ops/test_sdpa_multi.py": "def test_it_meets_what_it_says(): replace = returned = 1\n"},
    ),
    (names_are_the_fields, {"torch_attnkit/cuda/a.py": "class A:\n    def __call__(self, numbers): self.f(numbers)\n"}),
    (class_names_are_unique, {f"{FAMILIES}norm/{arch}/a.py": "class Config: ...\n" for arch in ("sm90", "sm100")}),
    (todos_name_their_end, {"a.py": f"# {MARK}(version torch 2.14): int4 arrives\n"}),
    (toolkits_know_no_op_and_no_family, {"torch_attnkit/demo.py": "import torch_attnkit.ops.sdpa_decode.op\n"}),
    (families_know_no_op_and_no_call, {f"{FAMILIES}a/plan.py": "from torch_attnkit.core.spec import short\n"}),
    (
        nothing_imports_in_a_circle,
        {"torch_attnkit/a.py": "from . import b\n", "torch_attnkit/b.py": "def f():\n    from . import a\n"},
    ),
]
RULES = list(dict.fromkeys(rule for rule, _ in WRONG))


def named(value: object) -> str:
    return getattr(value, "__name__", "+".join(value) if isinstance(value, dict) else str(value))


@pytest.fixture(scope="module")
def tree() -> Files:
    found = [p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.suffix in SUFFIXES]
    found += ROOT.glob("*.py")
    assert ROOT / "torch_attnkit/core/op.py" in found
    return {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in sorted(found)}


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_the_tree_obeys(rule, tree: Files):
    assert list(rule(tree)) == []


@pytest.mark.parametrize(("rule", "files"), WRONG, ids=named)
def test_the_rule_can_fail(rule, files: Files):
    assert len(list(rule(files))) == 1


@pytest.mark.parametrize(("rule", "files"), RIGHT, ids=named)
def test_the_rule_lets_pass(rule, files: Files):
    assert list(rule(files)) == []
