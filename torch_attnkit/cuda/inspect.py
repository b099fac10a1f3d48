"""What the assembler made of a kernel: ``python -m torch_attnkit.cuda.inspect FILE.so ...``.

Needs ``cuobjdump``, of the CUDA toolkit or as triton's wheel carries it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_EM_CUDA = 190  # e_machine of a cubin in the ELF header


@dataclass(frozen=True)
class Resources:
    """Registers a thread; bytes of stack, static shared and local memory of one kernel."""

    name: str
    registers: int
    stack: int
    shared: int
    local: int


def cubins(library: Path) -> list[bytes]:
    """The device ELF images inside a compiled kernel's library."""
    data, found, at = library.read_bytes(), [], 0
    while (at := data.find(b"\x7fELF", at)) >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == _EM_CUDA:
            sections, size, count = (
                struct.unpack_from("<Q", data, at + 40)[0],
                *struct.unpack_from("<HH", data, at + 58),
            )
            headers, segments = struct.unpack_from("<Q", data, at + 32)[0], struct.unpack_from("<HH", data, at + 54)
            found.append(data[at : at + max(sections + size * count, headers + segments[0] * segments[1])])
        at += 4
    return found


def cuobjdump() -> str | None:
    """The path of a cuobjdump, or None."""
    spec = importlib.util.find_spec("triton")
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    wheel = root / "backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(wheel) if wheel.exists() else None)


def _dump(cubin: bytes, option: str) -> str:
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("inspect: cuobjdump is neither on the PATH nor in triton's package")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


def resources(library: Path) -> list[Resources]:
    """What every kernel in the library takes."""
    found = []
    for cubin in cubins(library):
        text = _dump(cubin, "--dump-resource-usage")
        for name, usage in re.findall(r"Function (\S+?):\s*\n?\s*(REG:.*)", text):
            value = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", usage)}
            found.append(Resources(name, value["REG"], value["STACK"], value["SHARED"], value["LOCAL"]))
    return found


def sass(library: Path) -> str:
    """The disassembly of every kernel in the library."""
    return "\n".join(_dump(cubin, "--dump-sass") for cubin in cubins(library))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for kernel in resources(path):
            print(path.name, kernel)
