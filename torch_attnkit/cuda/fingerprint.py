"""What a compiled kernel does, as a short hash: of its PTX and of the host code around it, without the names in them.

CuTeDSL names kernels and host functions after modules, classes and argument types, so that a rename changes every text
and no instruction. Names become numbers here, comments and line information go. What is left is the device code, and of
the host code grid, cluster, shared memory and what is passed on: two kernels with one fingerprint do the same.
"""

from __future__ import annotations

import re

from torch_attnkit import digest

_ENTRY = re.compile(r"\.entry\s+(\w+)")
_HOST_FUNCTION = re.compile(r"@(cutlass_\w+)")
_NAME_BYTES = re.compile(r"array<\d+ x i8>")  # memory for a name, as long as that
_DEVICE_BINARY = "@kernels_binary("
_NO_CODE = (".loc", ".file")


def of(ptx: str, host: str) -> str:
    """The fingerprint of a kernel: its PTX, and its host function in MLIR's LLVM dialect."""
    kernels = {name: f"kernel{n}" for n, name in enumerate(dict.fromkeys(_ENTRY.findall(ptx)))}
    functions = {name: f"host{n}" for n, name in enumerate(dict.fromkeys(_HOST_FUNCTION.findall(host)))}
    return digest.of(_device_code(_renamed(ptx, kernels)), _host_code(_renamed(_renamed(host, kernels), functions)))


def _renamed(text: str, names: dict[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):  # one name may begin with another
        text = text.replace(name, names[name])
    return text


def _device_code(ptx: str) -> str:
    lines = (line.partition("//")[0].strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(_NO_CODE))


def _host_code(mlir: str) -> str:
    lines = (line for line in mlir.splitlines() if _DEVICE_BINARY not in line)  # assembled from the PTX
    return _NAME_BYTES.sub("array<name>", "\n".join(lines))
