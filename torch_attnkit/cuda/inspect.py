"""What the assembler made of a kernel, and what it makes of its PTX for another GPU of the family.

``python -m torch_attnkit.cuda.inspect FILE.so ...``. Needs ``cuobjdump``, of the CUDA toolkit or as triton's wheel
carries it.
"""

from __future__ import annotations

import importlib.util
import math
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


def _of_triton(tool: str) -> str | None:
    spec = importlib.util.find_spec("triton")
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    wheel = root / "backends/nvidia/bin" / tool
    return str(wheel) if wheel.exists() else None


def cuobjdump() -> str | None:
    """The path of a cuobjdump, or None."""
    return shutil.which("cuobjdump") or _of_triton("cuobjdump")


def ptxas() -> str | None:
    """The path of an assembler, or None; first the one for Blackwell of triton's wheel, which reads CuTeDSL's PTX."""
    return _of_triton("ptxas-blackwell") or shutil.which("ptxas")


def assemble(ptx: str, arch: str) -> bytes:
    """The cubin of a kernel's PTX for ``arch``, such as "sm_103a", whatever GPU the PTX names.

    Raises FileNotFoundError without an assembler, ValueError with its words if it refuses the PTX.
    """
    tool = ptxas()
    if tool is None:
        raise FileNotFoundError("inspect: ptxas is neither on the PATH nor in triton's package")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(retargeted(ptx, arch))
        done = subprocess.run([tool, "--gpu-name", arch, "-o", cubin, source], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"inspect: {tool} refuses PTX for {arch}: {done.stderr or done.stdout}")
        return cubin.read_bytes()


def retargeted(ptx: str, arch: str) -> str:
    """PTX with another GPU in its ``.target`` line."""
    return re.sub(r"(?m)^\.target \w+", f".target {arch}", ptx, count=1)


@dataclass(frozen=True)
class Launch:
    """What a kernel promises about its launches: threads of a block, and blocks that one multiprocessor must hold."""

    threads: int
    blocks: int

    def registers(self, each: int) -> int:
        """Registers that these blocks take together: a warp gets them in units of 256 (CUDA occupancy calculator)."""
        return self.blocks * -(-self.threads // 32) * -(-each * 32 // 256) * 256


def promised(ptx: str, kernel: str) -> Launch:
    """``.reqntid`` and ``.minnctapersm`` of one of the PTX's kernels."""
    head = ptx.partition(f".entry {kernel}(")[2].partition("{")[0]
    (sizes,) = re.findall(r"(?m)^\.reqntid ([\d, ]+)", head)
    blocks = re.findall(r"(?m)^\.minnctapersm (\d+)", head)
    return Launch(math.prod(map(int, sizes.split(","))), int(blocks[0]) if blocks else 1)


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
    return taken(cubins(library))


def taken(images: list[bytes]) -> list[Resources]:
    """What every kernel in these cubins takes."""
    found = []
    for cubin in images:
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
