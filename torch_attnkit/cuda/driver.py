"""The CUDA runtime of ``core/runtimes.py`` on hardware: a compiled kernel as a function that launches it.

The function takes torch tensors directly (tvm-ffi reads them through DLPack's C interface) and launches on torch's
current stream of the tensors' device, so graph capture and stream contexts work as for torch's own kernels.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_attnkit.core import cache
from torch_attnkit.core.errors import UnsupportedError

from .compile import CALLS, COMPILER, Compiled, install, version

_SIMULATED_SMS = 132  # an H200; what a plan made for a CPU tensor assumes


def load(compiled: Compiled, arch: str) -> Callable[..., None]:
    """The launch function of a compiled kernel. A library is loaded once in a process."""
    return _load(compiled.library, compiled.symbol, installed=compiled.installed)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; of an H200 for a CPU tensor, which only a simulator or warmup plans for."""
    if device.type != "cuda":
        return _SIMULATED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_of_sm(device: torch.device, least: int) -> int:
    """Bytes of shared memory that the CTAs of a multiprocessor have together; for a CPU tensor ``least``."""
    if device.type != "cuda":
        return least
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def driver_version() -> str:
    """The version of NVIDIA's kernel driver, for the record of a run; "unknown" where nvidia-smi is not to be had."""
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(question, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found[0] if found else "unknown"


@functools.cache
def _load(library: Path, symbol: str, *, installed: bool = False) -> Callable[..., None]:
    version(CALLS)
    import tvm_ffi

    _load_runtime()
    if library.suffix == ".o":
        from cutlass.cute.runtime import load_module

        return load_module(str(cache.checked(library)), enable_tvm_ffi=True)[symbol]
    return tvm_ffi.load_module(str(library if installed else cache.checked(library)))[symbol]


@functools.cache
def _load_runtime() -> Any:
    """CuTeDSL's launch library, whose symbols every compiled kernel uses; for the CUDA version that torch has.

    Of any installation of CuTeDSL, whoever brought it; nothing of it is imported.
    """
    roots = [Path(directory) / "nvidia_cutlass_dsl" for directory in sys.path]
    major = (torch.version.cuda or "13").split(".")[0]
    for root in roots:
        found = sorted(root.glob("cu*/lib/libcute_dsl_runtime.so"), key=lambda p: p.parts[-3] != f"cu{major}")
        if found:
            return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
    raise UnsupportedError(f"CUDA kernels need the runtime of {COMPILER}, which is not installed: {install(COMPILER)}")
