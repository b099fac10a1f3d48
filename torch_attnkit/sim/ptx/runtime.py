"""The C++ parts, and the one rule that keeps them apart from NVIDIA's runtime: what is loaded here is renamed first.

Host code that CuTeDSL compiles calls the CUDA runtime through the wrappers of libcute_dsl_runtime.so, by name, and the
first library in the process that has a name answers. So the simulator's runtime (csrc/sim/ptx_runtime) has names of its
own, as long as the originals, and object code gets them written in before it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import io
from typing import Any

from torch_attnkit.core.errors import UnsupportedError

DSL, CHECKED_WITH = "nvidia-cutlass-dsl", "4.8.1"
CURE = "pip install 'torch_attnkit[sim]'"


@functools.cache
def machine() -> Any:
    """The PTX machine, ``torch_attnkit.sim._ptx``; UnsupportedError in an installation without it."""
    return _extension("torch_attnkit.sim._ptx")


@functools.cache
def runtime() -> Any:
    """The simulator's CUDA runtime, with its symbols visible to libraries that are loaded later."""
    module = _extension("torch_attnkit.sim._ptx_runtime")
    ctypes.CDLL(module.__file__, mode=ctypes.RTLD_GLOBAL)
    return module


def _extension(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"the PTX simulator's extension {name} has not been built: {error}") from None


@functools.cache
def require() -> None:
    """Raise UnsupportedError, with the cure, unless all that the simulator needs is installed."""
    machine()
    runtime()
    require_compiler()
    for module, package in (("tvm_ffi", "apache-tvm-ffi"), ("elftools", "pyelftools")):
        if importlib.util.find_spec(module) is None:
            raise UnsupportedError(f"the PTX simulator needs the package {package}, which is not installed: {CURE}")


@functools.cache
def require_compiler() -> None:
    """Raise UnsupportedError unless the installed CuTeDSL is the one that the simulator was checked with.

    How its host code calls the runtime and encodes TMA descriptors is nobody's documented interface.
    """
    try:
        found = importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"the PTX simulator needs the package {DSL}, which is not installed: {CURE}") from None
    if found != CHECKED_WITH:
        raise UnsupportedError(f"the PTX simulator was checked with {DSL} {CHECKED_WITH}, found {found}: {CURE}")


def own_name(symbol: str) -> str:
    """The simulator's name for a symbol of NVIDIA's runtime: the same length, another first letter."""
    return "S" + symbol[1:]


def renamed(code: bytes) -> bytes:
    """ELF code (an object or a library) that calls the simulator's runtime where ``code`` calls NVIDIA's.

    The names of undefined symbols change in place, and never their length, so every offset stays right.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    own, names = bytearray(code), set(runtime().symbols)
    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if isinstance(section, SymbolTableSection):
            names_begin = section.stringtable["sh_offset"]
            for symbol in section.iter_symbols():
                if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name in names:
                    own[names_begin + symbol["st_name"]] = ord("S")
    return bytes(own)
