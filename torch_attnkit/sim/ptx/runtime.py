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
import struct
from typing import Any

from torch_attnkit.core.errors import UnsupportedError

DSL, CHECKED_WITH = "nvidia-cutlass-dsl", "4.8.1"
CURE = "pip install 'torch_attnkit[sim]'"
_SYMTAB, _DYNSYM = 2, 11  # section types of ELF
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section (0: undefined), value, size


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
    if importlib.util.find_spec("tvm_ffi") is None:
        raise UnsupportedError(f"the PTX simulator needs the package apache-tvm-ffi, which is not installed: {CURE}")


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

    The names of undefined symbols change in place, and never their length, so every offset stays right. 64 bits,
    little-endian: CuTeDSL runs on no other host.
    """
    own, names = bytearray(code), {symbol.encode() for symbol in runtime().symbols}
    (sections,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections + size * i) for i in range(count)]
    for _, kind, _, _, start, length, strings, *_ in headers:
        if kind not in (_SYMTAB, _DYNSYM):
            continue
        for at in range(start, start + length, _SYMBOL.size):
            name, _, _, section, _, _ = _SYMBOL.unpack_from(code, at)
            begin = headers[strings][4] + name
            if section == 0 and code[begin : code.index(b"\0", begin)] in names:
                own[begin] = ord("S")
    return bytes(own)
