"""clang from the ziglang package: checking a source, and turning one kernel of it into a loadable object, cached."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_attnkit.core import cache, config
from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.paths import csrc

from . import classes, constants, conversions, forbidden, source
from .errors import refuse
from .instrument import USER_FILE, Site, instrument
from .repair import repaired

_HEADERS = "atomic array common compute geometric integer limits math matrix numeric pack relational simdgroup"
_STANDARD = re.compile(
    rf"^[ \t]*#[ \t]*include[ \t]*<metal_(?:stdlib|simdgroup_matrix|type_traits|{'|'.join(_HEADERS.split())})>", re.M
)
_LOGGING = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_logging>", re.M)  # of Metal 3.2
_X86, _ARM = ("x86_64", "-march=x86-64-v3"), ("aarch64", "-march=armv8.2-a+fp16")
_MACHINES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
# Types whose rounding is visible round after every operation, products and sums are never fused, and an array index is
# checked where the extent is known.
_LANGUAGE = [
    "-std=c++17", "-nostdinc", "-ffreestanding", "-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none",
    "-Xclang", "-fbfloat16-excess-precision=none", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
    "-fno-math-errno", "-flax-vector-conversions=none", "-fno-finite-loops",
    "-fno-threadsafe-statics", "-fsanitize=bounds", "-fsanitize-trap=bounds", "-fno-sanitize-merge",
    "-ftrivial-auto-var-init=pattern", "-gline-tables-only", "-fPIC", "-fstack-clash-protection",
]  # fmt: skip
# A collective is known by its whole path of calls: everything is inlined, and equal calls in two branches stay two.
_KEEP_APART = ["-mllvm", "-simplifycfg-hoist-common=0", "-mllvm", "-simplifycfg-sink-common=0"]
_WARNINGS = [
    "-Wno-everything", "-Wimplicit-float-conversion", "-Wno-implicit-int-float-conversion", "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized", "-Werror=return-type",
    "-Werror=vla", "-Werror=vla-extension", "-Werror=array-bounds", "-ferror-limit=20",
]  # fmt: skip
# Metal converts nothing to bfloat on its own. The message names the type as written, or as an alias of it.
_TO_BFLOAT = re.compile(
    r"^([^\n]*): warning: (implicit conversion[^\n]*to '(?:bfloat|__bf16|[^']*' \(aka '__bf16')[^\n]*)", re.M
)
_ENTRY = "msl_entry.h"  # before every program, precompiled
_BEGIN = (
    "#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)\n"
    f"typedef int {conversions.BEGINS};\n"
)
_END = f'\n#pragma clang attribute pop\n# 1 "entry"\ntypedef int {conversions.ENDS};\n'
_SOURCES = (
    "tokens.py",
    "constants.py",
    "forbidden.py",
    "classes.py",
    "calls.py",
    "source.py",
    "conversions.py",
    "pointers.py",
    "repair.py",
    "instrument.py",
    "compiler.py",
)
# The preprocessor leaves macros in pragmas alone, and when the compiler meets one they are gone: it is shown another
# line in its place.
_UNROLLED = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+((?:clang[ \t]+loop[ \t]+)?unroll[^\n]*?)[ \t]*(?://[^\n]*)?$", re.M)
_MARKED = re.compile(r"msl_pragma\b(.*?)\bmsl_pragma_end\b", re.S)
# Of Apple's standard library, which MLX passes to its internals (include/msl_internals.h).
_MATH_MODES = [(f"__METAL_{mode}_MATH__", "0") for mode in ("MAYBE_FAST", "FAST", "PRECISE")]
_TREE = ["-fsyntax-only", "-Xclang", "-ast-dump"]  # what is precompiled is not in it
_CHECKED = "-DMSL_CHECKED"
_IR = ["-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-o", "-"]
_ROUNDS = 8  # of rewriting conversions: what one replaces can bring another to light, as in casts inside of casts


@dataclass(frozen=True)
class Variable:
    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Built:
    """A compiled kernel: its shared object, its places in the source, and its threadgroup memory."""

    path: Path
    sites: list[Site]
    variables: list[Variable]
    threadgroup_bytes: int


@functools.cache
def _zig() -> str:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise UnsupportedError(
            "the Metal simulator needs the package ziglang (its compiler), which is not installed: "
            "pip install 'torch_attnkit[sim]'"
        )
    return str(Path(spec.origin).parent / ("zig.exe" if os.name == "nt" else "zig"))


def require() -> None:
    """Raise UnsupportedError, with the cure, unless a source can be compiled for this machine."""
    _zig()
    _target()


def _target() -> list[str]:
    machine = _MACHINES.get(platform.machine().lower())
    if machine is None or sys.platform not in ("linux", "darwin"):
        raise UnsupportedError(
            f"the Metal simulator runs on Linux and macOS, x86-64 and arm64; this is {platform.platform()}"
        )
    name, flag = machine
    return ["-target", f"{name}-linux-gnu" if sys.platform == "linux" else f"{name}-macos-none", flag]


def include() -> Path:
    return csrc() / "sim" / "metal" / "include"


@functools.cache
def _tools_key() -> str:
    """A digest of everything but the source that decides what a compiled kernel looks like."""
    _zig()  # says what to install, where the version of a missing package would not
    digest = hashlib.sha256(importlib.metadata.version("ziglang").encode())
    here = Path(__file__).parent
    for path in [*sorted(include().glob("*.h")), *(here / f for f in _SOURCES)]:
        digest.update(path.read_bytes())
    return digest.hexdigest() + " ".join(_target())


def _called(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_zig(), *arguments], cwd=cwd, capture_output=True, text=True)


def _run(arguments: Sequence[str], cwd: Path) -> tuple[str, str]:
    done = _called(arguments, cwd)
    if done.returncode:
        raise SyntaxError(_diagnostics(done.stderr))
    return done.stdout, done.stderr


def _diagnostics(text: str) -> str:
    """clang's messages without what concerns the simulator's own headers."""
    noise = re.compile(r"In file included|fatal error: too many|\d+ (error|warning)")
    kept = [line for line in text.split("\n") if not noise.match(line)]
    return "\n".join(kept).strip() or text.strip()


@contextmanager
def _cached(key: str) -> Iterator[tuple[Path, Path | None]]:
    """(final folder, folder to fill or None if it is there); filled elsewhere and moved, so that no one sees half."""
    name = hashlib.sha256((_tools_key() + key).encode()).hexdigest()[:32]
    folder = cache.folder(config.cache_dir() / "metal-simulator")
    final = folder / name
    if cache.found(final):
        yield final, None
        return
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield final, work
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _keep(work: Path, *names: str) -> None:
    for path in work.iterdir():
        if path.name not in names:
            path.unlink()
        else:
            cache.private(path)


@dataclass(frozen=True)
class Host:
    """What another runtime than ``torch.mps`` says to its compiler about a source.

    ``folders`` hold its headers, ``macros`` are defined before it, and of its kernels only ``kernels`` are wanted.
    """

    folders: tuple[str, ...] = ()
    macros: tuple[tuple[str, str], ...] = ()
    kernels: tuple[str, ...] = ()


def preprocess(text: str, version: int, cwd: Path, host: Host | None = None) -> str:
    """The source with macros expanded; the standard headers are built in and so are blanked."""
    text = _LOGGING.sub("", text) if version >= 320 else text
    (cwd / USER_FILE).write_text(_UNROLLED.sub(r"msl_pragma \1 msl_pragma_end", _STANDARD.sub("", text)))
    macros = [f"-D__METAL_VERSION__={version}", "-D__METAL__=1", "-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1"]
    macros += [f"-D{name}={value}" for name, value in (*_MATH_MODES, *host.macros)] if host else []
    flags = ["-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc", "-w", "-include", str(include() / "msl_macros.h")]
    out = _run(["clang", *flags, *macros, USER_FILE], cwd)[0]
    return _MARKED.sub(lambda m: f"#pragma {' '.join(m[1].split())}", out)


def _launcher(unit: source.Unit, entry: source.Entry, number: int | None = None) -> str:
    """The functions that the machine looks for, or with a ``number`` only what makes clang instantiate the kernel."""
    d = unit.declarations[entry.kernel]
    first = source.THREADGROUP + len(unit.variables)  # what a launch gives is numbered after the variables
    slots = [p.slot if p.slot < source.THREADGROUP else p.slot - source.THREADGROUP + first for p in d.parameters]
    cast = f"(void (*)({entry.signature}))" if entry.signature else ""
    kind = f"msl::entry<{cast}&{entry.expression}{''.join(f', {n}' for n in slots)}>"
    if number is not None:
        return f"void msl_check_{number}(const msl::context* c) {{ {kind}::run(c); }}\n"
    limit = "1024"
    if d.limit:
        suffix = entry.expression[len(re.match(r"[\w:]+", entry.expression)[0]) :] or "<>"  # type: ignore[index]
        limit = f"msl_limit_{entry.kernel}{suffix}()"
    return (
        f'extern "C" {{\nvoid msl_run(const msl::context* c) {{ {kind}::run(c); }}\n'
        f"const msl::description* msl_parameters() {{ return {kind}::descriptions; }}\n"
        f"int msl_parameter_count() {{ return {kind}::count; }}\nint msl_thread_limit() {{ return {limit}; }}\n}}\n"
    )


def _arguments(unit: source.Unit, text: str, tail: str, flags: Sequence[str], cwd: Path) -> list[str]:
    """clang's, for a program that is written to its file."""
    (cwd / conversions.FILE).write_text(_BEGIN + text + _END + tail)
    defines = [f for f in flags if f == _CHECKED] + ["-DMSL_FOREIGN"] * unit.foreign
    if not any(f.startswith("-DMSL_CONSTANT") for f in flags):
        flags = [*flags, *constants.macros(unit.constants, {})]
    given = [*defines, *(f for f in flags if f != _CHECKED)]
    return ["clang", "-x", "c++", *_common(), "-include-pch", _precompiled(defines), *given, conversions.FILE]


def _common() -> list[str]:
    """What a program and the headers before it are compiled with: clang refuses headers of other options."""
    return [*_target(), *_LANGUAGE, *_WARNINGS, "-O1"]


def _precompiled(defines: list[str]) -> str:
    """The simulator's headers as clang has read them; reading them takes five times as long as a small program."""
    header = include() / _ENTRY
    with _cached(f"headers\0{defines}\0{header}") as (final, work):
        if work is not None:
            flags = [*_common(), *defines, "-Xclang", "-fno-pch-timestamp"]
            _run(["clang", "-x", "c++-header", *flags, str(header), "-o", "entry.pch"], work)
            _keep(work, "entry.pch")
    return str(cache.checked(final / "entry.pch"))


def _compile(unit: source.Unit, tail: str, flags: Sequence[str], cwd: Path) -> str:
    out, messages = _run(_arguments(unit, unit.text, tail, flags, cwd), cwd)
    if found := _TO_BFLOAT.search(messages):
        raise SyntaxError(f"{found[1]}: error: {found[2]}: Metal has none to bfloat, write bfloat(x)")
    return out


def _instances(unit: source.Unit) -> str:
    return "".join(_launcher(unit, e, n) for n, e in enumerate(unit.entries))


def translate(preprocessed: str, cwd: Path, host: Host | None = None) -> source.Unit:
    """The program of a source, once it compiles and converts vectors as Metal does; else raises SyntaxError."""
    unit = source.rewrite(preprocessed, host is not None, host.kernels if host and host.kernels else None)
    tail = _instances(unit)
    methods = classes.Methods(frozenset(unit.methods))
    for _ in range(_ROUNDS):
        failed: SyntaxError | None = None
        try:
            tree = _compile(unit, tail, _TREE, cwd)
            conversions.refuse_unwritten(tree)
            if not conversions.suspicious(tree):
                return unit
        except SyntaxError as error:
            failed = error
        # Again, with places as they are in the text, and all errors: a comparison is no bool4 before it is rewritten.
        flags = [*_TREE, "-ferror-limit=0", "-fdiagnostics-print-source-range-info"]
        done = _called(_arguments(unit, conversions.flat(unit.text), tail, flags, cwd), cwd)
        text = conversions.rewritten(unit.text, _BEGIN.count("\n"), done.stdout, done.stderr, methods)
        if text == unit.text:
            raise failed or refuse("a vector is reinterpreted in a function of the simulator's own")
        unit.text = text
    raise refuse(f"vectors are still reinterpreted after {_ROUNDS} rounds of writing conversions out")


def check(text: str, version: int, host: Host | None = None) -> source.Unit:
    """The kernels of a source. Raises SyntaxError, as ``torch.mps`` does, if any of them does not compile."""
    with _cached(f"check\0{version}\0{host}\0{text}") as (final, work):
        if work is not None:
            unit = translate(preprocess(text, version, work, host), work, host)
            (work / "unit.json").write_text(json.dumps(asdict(unit)))
            _keep(work, "unit.json")
    return _read_unit(cache.checked(final / "unit.json"))


def front_end(unit: source.Unit, version: int, work: Path) -> str:
    """The program of all kernels before any optimisation, under the language rules that a version has."""
    rules = ["-Werror=c++20-extensions", *(["-Werror=pre-c++17-compat"] if version < 400 else [])]
    return _compile(unit, _instances(unit), [*rules, *_IR], work)


def _read_unit(path: Path) -> source.Unit:
    d = json.loads(path.read_text())
    entries = [source.Entry(**e) for e in d["entries"]]
    unit = source.Unit(d["text"], {}, entries, d["variables"], foreign=d["foreign"])
    for name, k in d["declarations"].items():
        parameters = tuple(source.Parameter(**p) for p in k["parameters"])
        unit.declarations[name] = source.Declaration(name, k["template"], k["limit"], parameters)
    unit.constants = {int(number): constants.Constant(**c) for number, c in d["constants"].items()}
    return unit


def _layout(sizes: dict[int, tuple[int, int]], names: list[str]) -> tuple[list[Variable], int]:
    """Offsets of the threadgroup variables that survive optimisation, each at a multiple of 16."""
    used, out = 0, []
    for number, name in enumerate(names):
        size, align = sizes.get(number, (0, 1))
        used = -(-used // max(align, 16)) * max(align, 16) if size else used
        out.append(Variable(name, used, size))
        used += size
    return out, used


@dataclass(frozen=True)
class Variant:
    """How a kernel is built: ``mode`` is fast, checked or counting, ``lockstep`` that of Settings, ``values`` those of
    function constants by index."""

    mode: str
    lockstep: bool = False
    values: tuple[tuple[int, constants.Value], ...] = ()


def build(text: str, unit: source.Unit, entry: source.Entry, how: Variant, version: int) -> Built:
    """One kernel as a shared object."""
    mode = how.mode
    with _cached(f"build\0{how}\0{version}\0{entry}\0{unit.text}\0{text}") as (final, work):
        if work is not None:
            front = [*_IR, *constants.macros(unit.constants, dict(how.values)), *[_CHECKED] * (mode != "fast")]
            ir = _compile(unit, _launcher(unit, entry), front, work)
            if found := next(forbidden.in_program(ir), None):
                raise refuse(f"{entry.host}: {found}")
            ir = repaired(ir, checked=mode != "fast", lockstep=how.lockstep)
            (work / "front.ll").write_text(ir)
            # Kernels are long and launches short: what better code would save, compiling it costs twice over.
            level = ["-O1", *([] if mode == "fast" else ["-fno-vectorize", "-fno-slp-vectorize"])]
            flags = ["-x", "ir", *_target(), "-fPIC", "-w", *_KEEP_APART, *level]
            ir = _run(["clang", *flags, "-S", "-emit-llvm", "-o", "-", "front.ll"], work)[0]
            done = instrument(ir, checked=mode != "fast", counting=mode == "counting")
            (work / "kernel.ll").write_text(done.text)
            code = ["-x", "ir", *_target(), "-fPIC", "-O0", "-Xclang", "-disable-llvm-passes", "-w"]
            _run(["clang", *code, "-c", "-o", "kernel.o", "kernel.ll"], work)
            _link(work)
            variables, used = _layout(done.variables, unit.variables)
            facts = {"sites": done.sites, "variables": [asdict(v) for v in variables], "bytes": used}
            (work / "kernel.json").write_text(json.dumps(facts))
            _keep(work, "kernel.so", "kernel.json")
    facts = json.loads(cache.checked(final / "kernel.json").read_text())
    sites = [tuple((line, column) for line, column in s) for s in facts["sites"]]
    return Built(cache.checked(final / "kernel.so"), sites, [Variable(**v) for v in facts["variables"]], facts["bytes"])


@functools.cache
def _stub() -> str:
    """The object with the calls into the machine, which is the same for every kernel."""
    with _cached("stub") as (final, work):
        if work is not None:
            flags = [f for f in _LANGUAGE if not f.startswith(("-fsan", "-gline", "-fno-sanitize"))]
            source_file = str(include() / "msl_stub.h")
            _run(["clang", "-x", "c++", *_target(), *flags, "-O2", "-w", "-c", "-o", "stub.o", source_file], work)
            _keep(work, "stub.o")
    return str(cache.checked(final / "stub.o"))


def _link(work: Path) -> None:
    if sys.platform == "linux":
        _run(["ld.lld", "-shared", "-o", "kernel.so", "kernel.o", _stub()], work)
    else:
        lookup = ["-shared", "-Wl,-undefined,dynamic_lookup"]  # memcpy and the like come from the process
        _run(["cc", *_target()[:2], *lookup, "-o", "kernel.so", "kernel.o", _stub()], work)


def embed(text: str, host: Host | None = None) -> str:
    """The source with torch's own headers in place, as ``torch.mps.compile_shader`` prepares it.

    For another host the headers are those of its folders, and what is not ASCII, in comments, does not matter.
    """
    import torch
    from torch.utils._cpp_embed_headers import _embed_headers

    if host is not None:
        folders = [Path(f) for f in host.folders]
        whole = _embed_headers([line + "\n" for line in text.split("\n")], folders, set())
        return whole.encode("ascii", "replace").decode()
    if not text.isascii():
        at = next(i for i, c in enumerate(text) if not c.isascii())
        line = text.count("\n", 0, at) + 1
        raise refuse(f"non-ASCII character {text[at]!r}: the source is handed to Metal as ASCII", line)
    return _embed_headers([line + "\n" for line in text.split("\n")], [Path(torch.__path__[0]) / "include"], set())
