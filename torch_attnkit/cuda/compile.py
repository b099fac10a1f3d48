"""The one place that compiles CuTeDSL: a signature in, a shared library out, at most once on a machine.

A kernel is asked for by a function that traces it, and by what it is compiled for. The function is the host's and
imports the kernel's module when it is called, so that only a process that compiles imports cutlass. Both make a
``Request``: plain data, so it can be hashed, pickled and compiled in another process. It is looked up in memory, in the
bundles named by ``use_bundle``, in installed wheels (``installed.py``), in ``cache_dir()/cuda``, and only then
compiled, under a file lock and renamed into place whole. The name of a file carries a digest of all that its contents
depend on: the request, the tracing function and what it imports (``torch_attnkit/digest.py``), the compiler's options,
and the processor that runs the host code; the ``.json`` beside it says which compiler made it. For a simulator the
assembler is left out (``passes.py``): the library has another suffix then, and the PTX is the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_attnkit import digest
from torch_attnkit.core import cache, config, runtimes
from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.core.target import Target

from . import compile_times, fingerprint, installed, repeat
from .limits import tracing
from .passes import in_stages

COMPILER, CALLS = "nvidia-cutlass-dsl", "apache-tvm-ffi"
_EXTRAS = {COMPILER: "compile", CALLS: "cuda"}  # what installs a package
# A cubin for sm_100f is for every GPU of that family: a B200 (10.0) and a B300 (10.3), which refuses one for sm_100a.
# One for sm_120f is for GeForce RTX 50, RTX PRO (12.0) and DGX Spark (12.1), one for sm_80 for GPUs of 8.0 and 8.6.
GPU_ARCH = {"sm80": "sm_80", "sm89": "sm_89", "sm90": "sm_90a", "sm100": "sm_100f", "sm120": "sm_120f"}
_FAMILIES = "torch_attnkit.kernels."
Traced = tuple[Any, list[Any]]  # a host function of CuTeDSL's, and stand-ins for its arguments
Trace = Callable[..., Traced]  # (arch, **signature), at the top of a module of a family
_LIBRARIES, _SIMULATED = (".so", ".o"), ".simulated.so"  # for a GPU and a simulator; for a simulator alone
_found: dict[tuple[Path, Request, bool], Compiled] = {}
_bundles: list[Path] = []
_recorder: Callable[[Request], Callable[..., None]] | None = None  # while recording: what stands in for launchers
_compiling = threading.Lock()  # CuTeDSL keeps global state while it traces


@dataclass(frozen=True)
class Request:
    """One kernel: ``trace(arch, **signature)`` of ``module``, of a family, says what to compile.

    The signature holds names and values that are str, int, float, bool, None or tuples of these.
    """

    arch: str
    module: str
    trace: str
    signature: tuple[tuple[str, Any], ...]
    built_for: str = field(default="", repr=False)  # the architecture that is compiled for, where it is another

    @classmethod
    def of(cls, arch: str, trace: Trace, **signature: Any) -> Request:
        return cls(arch, trace.__module__, trace.__name__, tuple(signature.items()))

    def __str__(self) -> str:
        return f"{self.name} for {self.arch}: " + ", ".join(f"{k}={v!r}" for k, v in self.signature)

    @property
    def family(self) -> str:
        return self.module.removeprefix(_FAMILIES).split(".")[0]

    @property
    def name(self) -> str:
        """The family, and which of its kernels."""
        return self.family + self.trace.removeprefix("trace")

    @functools.cached_property
    def file(self) -> str:
        """The name of the compiled kernel, without its suffix: readable first, unique by the hash."""
        sources = digest.of_definitions(self.module, self.trace, arch=self.arch)
        parts = (repr(self), sources, _options(self), platform.machine())
        return f"{self.name}-{self.arch}-{digest.of(*parts)}"


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: ``library`` launches it, on a GPU if it was asked for without ``simulated``.

    ``ptx`` beside it is what a simulator runs; an ``installed`` one has none.
    """

    request: Request
    library: Path
    installed: bool = False

    @property
    def ptx(self) -> Path:
        return self.library.parent / f"{self.request.file}.ptx"

    @property
    def symbol(self) -> str:
        return f"attnkit_{self.request.name}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """What it does, whatever it is called (``fingerprint.py``)."""
        return str(json.loads((self.library.parent / f"{self.request.file}.json").read_text())["fingerprint"])


def launcher(target: Target, device: torch.device, trace: Trace, **signature: Any) -> Callable[..., None]:
    """The function that launches one kernel on ``device``, compiled for ``target`` if it has never been.

    The function takes the arguments that ``trace`` declares, by position and without the stream: it launches on torch's
    current stream.
    Raises UnsupportedError without nvidia-cutlass-dsl, RuntimeError if the kernel does not compile.
    """
    request = replace(Request.of(target.arch, trace, **signature), built_for=target.built_for)
    if _recorder is not None:
        return _recorder(request)
    compiled = get(request, target.simulated)
    launch = repeat.watched(runtimes.of(target.arch, target.simulated).load(compiled, target.arch))
    return launch if target.simulated or torch.cuda.device_count() < 2 else on_device(device, launch)


def on_device(device: torch.device, launch: Callable[..., None]) -> Callable[..., None]:
    """``launch`` with ``device`` as the current one: the driver takes a stream's number for one of the current device,
    and torch makes no device current for ops that are defined in Python."""

    def run(*args: Any) -> None:
        if torch.cuda.current_device() == device.index:
            launch(*args)
        else:
            with torch.cuda.device(device):
                launch(*args)

    return run


def get(request: Request, simulated: bool = False) -> Compiled:
    """The compiled kernel, from memory, a bundle, a wheel, the cache, or the compiler; ``simulated``: a simulator will
    do."""
    folder = config.cache_dir() / "cuda"
    key = (folder, request, simulated)
    found = _found.get(key)
    if found is None:
        with _compiling:
            found = _found.get(key) or _kept(request, folder, simulated) or _compile(request, folder, simulated)
            _found[key] = found
    return found


def origins(plan: Callable[[], Any]) -> Iterator[str]:
    """Where the kernels that ``plan()`` asks for would come from, in words, a line each; compiles nothing."""
    with recording() as asked:
        plan()
    lines = Counter(f"{request.name}: {origin(request)}" for request in asked)
    return (line + (f" ({count} kernels)" if count > 1 else "") for line, count in lines.items())


def origin(request: Request) -> str:
    """Where the kernel would come from, for a GPU: a bundle, a wheel, the cache, or the compiler and in what time."""
    folder = config.cache_dir() / "cuda"
    kept = _kept(request, folder, simulated=False)
    if kept is not None:
        if kept.installed:
            return f"wheel {next(w for w in installed.wheels() if w.folder == kept.library.parent)}"
        return "cache" if kept.library.parent == folder else f"bundle {kept.library.parent.parent}"
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        return f"in no wheel and not in the cache, and there is no compiler: {install(COMPILER)}"
    return f"would be compiled, about {compile_times.of(request.name):.1f} s"


def compile_into(request: Request, folder: Path) -> Compiled:
    """Put the compiled kernel, for a GPU, into ``folder``, unless it is there."""
    with _compiling:
        return _in((folder,), request, simulated=False) or _compile(request, folder, simulated=False)


def use_bundle(folder: str | Path) -> None:
    """Search ``folder``, which ``python -m torch_attnkit warmup --out`` wrote, before the cache."""
    path = Path(folder) / "cuda"
    if not any(path.glob("*.json")):
        raise ValueError(f"use_bundle: {folder} holds no compiled kernels; write some with warmup --out {folder}")
    _bundles.append(cache.folder(path))


@contextlib.contextmanager
def recording(stand_in: Callable[[Request], Callable[..., None]] | None = None) -> Iterator[list[Request]]:
    """Collect what is asked for inside this block, compiling nothing: launchers do nothing, or are ``stand_in``'s."""
    global _recorder
    asked: list[Request] = []

    def recorder(request: Request) -> Callable[..., None]:
        asked.append(request)
        return stand_in(request) if stand_in else lambda *args: None

    outer, _recorder = _recorder, recorder
    try:
        yield asked
    finally:
        _recorder = outer


def version(package: str) -> str:
    """The installed version of a package that CUDA kernels need; UnsupportedError, naming the cure, without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        what = "compiling CUDA kernels needs" if package == COMPILER else "CUDA kernels need"
        raise UnsupportedError(f"{what} the package {package}, which is not installed: {install(package)}") from None


def install(package: str) -> str:
    """The command that installs a package that CUDA kernels need."""
    return f"pip install 'torch_attnkit[{_EXTRAS[package]}]'"


def _kept(request: Request, folder: Path, simulated: bool) -> Compiled | None:
    """The kernel from a bundle, an installed wheel (for a GPU: it holds no PTX), or the cache in ``folder``."""
    if found := _in(tuple(_bundles), request, simulated):
        return found
    if not simulated and (shipped := installed.find(request.arch, request.file)):
        return Compiled(request, shipped[1], installed=True)
    return _in((folder,), request, simulated)


def _in(folders: tuple[Path, ...], request: Request, simulated: bool) -> Compiled | None:
    for folder in folders:
        for suffix in (*_LIBRARIES, *((_SIMULATED,) if simulated else ())):
            if path := cache.found(folder / (request.file + suffix)):
                return Compiled(request, path)
    return None


def _compile(request: Request, folder: Path, simulated: bool) -> Compiled:
    cache.folder(folder)
    with open(folder / f"{request.file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _in((folder,), request, simulated)  # another process may have been first
        if found is None:
            try:
                found = _build(request, folder, simulated)
            except UnsupportedError:
                raise
            except Exception as error:
                raise RuntimeError(f"{request}: does not compile: {type(error).__name__}: {error}") from error
        return found


def _options(request: Request) -> str:
    return f"--enable-tvm-ffi --gpu-arch {GPU_ARCH[request.built_for or request.arch]} --keep-ptx"


def _build(request: Request, folder: Path, simulated: bool) -> Compiled:
    """Trace, compile and link in a folder of its own, then move the parts into place, the library last."""
    simulated = simulated and _linker() is not None  # an object is known to a simulator by its machine code
    for package in (COMPILER, CALLS):
        version(package)
    import cutlass.cute as cute

    began = time.process_time()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        host, arguments = getattr(importlib.import_module(request.module), request.trace)(
            request.arch, **dict(request.signature)
        )
        built, options = Compiled(request, Path(work) / "kernel.o"), f"{_options(request)} --dump-dir {work}"
        with in_stages(assembled=not simulated), tracing(request.arch):
            # An engine would make machine code of the host's a second time; what is kept is the exported library.
            compiled = cute.compile(host, *arguments, options=options, no_jit_engine=True)
            compiled.export_to_c(str(built.library), built.symbol, export_only_tvm_ffi_symbols=True)
        library = _link(built.library)
        (ptx,) = Path(work).glob("*.ptx")
        facts = asdict(request) | {
            "compiler": version(COMPILER),
            "host": platform.machine(),
            "seconds": round(time.process_time() - began, 1),  # of a processor
            "fingerprint": fingerprint.of(ptx.read_text(), str(compiled.ir_module)),
        }
        (Path(work) / "kernel.json").write_text(json.dumps(facts, indent=1) + "\n")
        for source in (ptx, Path(work) / "kernel.json"):
            cache.keep(source, folder / (request.file + source.suffix))
        suffix = _SIMULATED if simulated else library.suffix
        return Compiled(request, cache.keep(library, folder / (request.file + suffix)))


def _link(object_file: Path) -> Path:
    """The object as a shared library; unchanged on a machine without a linker, where loading it needs cutlass."""
    linker = _linker()
    if linker is None:
        return object_file
    library = object_file.with_suffix(".so")
    subprocess.run([linker, "-shared", "-o", library, object_file], check=True, capture_output=True)
    return library


def _linker() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
