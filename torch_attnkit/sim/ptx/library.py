"""Seam 2 in the simulator: a kernel of the package's compile cache becomes a function that runs its PTX."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_attnkit.core import cache

from . import launch, store
from .gpu import call_with_tensors, device
from .runtime import machine, renamed, require_compiler


def load(compiled: Any, arch: str) -> Callable[..., None]:
    """The launch function of a compiled kernel (``cuda.compile.Compiled``) for ``arch``. It is loaded once."""
    function = _load(compiled.library, compiled.ptx, compiled.symbol, arch)
    return lambda *args: call_with_tensors(function, args, {})


@functools.cache
def _load(library: Path, ptx: Path, symbol: str, arch: str) -> Callable[..., Any]:
    require_compiler()
    machine()
    import tvm_ffi

    code, text = cache.checked(library).read_bytes(), cache.checked(ptx).read_text()
    launch.register(code, text)
    if library.suffix == ".o":  # of a machine without a linker: CuTeDSL's own takes its place
        store.save(code, text)
        with device(arch):
            from cutlass.cute.runtime import load_module

            linked: Callable[..., Any] = load_module(str(cache.checked(library)), enable_tvm_ffi=True)[symbol]
            return linked
    with tempfile.TemporaryDirectory(prefix="attnkit-ptx-") as folder:
        own = Path(folder) / library.name
        own.write_bytes(renamed(code))
        function: Callable[..., Any] = tvm_ffi.load_module(str(own))[symbol]  # the file may go, what is loaded stays
        return function
