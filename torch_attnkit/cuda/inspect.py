"""What the assembler made of a kernel, and what it makes of its PTX for one GPU of a family.

``python -m torch_attnkit.cuda.inspect FILE.so ...``. Needs ``cuobjdump``, for machine code ``nvdisasm``, of the CUDA
toolkit or as triton's wheel carries them, and pyelftools.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.common.utils import struct_parse
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.structs import ELFStructs

_INSTRUCTION = 16  # bytes


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
    data, layout = library.read_bytes(), ELFStructs(little_endian=True, elfclass=64)
    layout.create_basic_structs()
    found = []
    for match in re.finditer(b"\x7fELF", data):
        header = struct_parse(layout.Elf_Ehdr, io.BytesIO(data), match.start())
        if header.e_machine == "EM_CUDA":
            tables = (("e_shoff", "e_shentsize", "e_shnum"), ("e_phoff", "e_phentsize", "e_phnum"))
            length = max(header[begin] + header[size] * header[count] for begin, size, count in tables)
            found.append(data[match.start() : match.start() + length])
    return found


def _of_triton(tool: str) -> str | None:
    spec = importlib.util.find_spec("triton")
    root = Path(spec.origin).parent if spec and spec.origin else Path()
    wheel = root / "backends/nvidia/bin" / tool
    return str(wheel) if wheel.exists() else None


def cuobjdump() -> str | None:
    """The path of a cuobjdump, or None."""
    return shutil.which("cuobjdump") or _of_triton("cuobjdump")


def nvdisasm() -> str | None:
    """The path of a disassembler, or None."""
    return shutil.which("nvdisasm") or _of_triton("nvdisasm")


def ptxas() -> str | None:
    """The path of an assembler, or None; first the one for Blackwell of triton's wheel, which reads CuTeDSL's PTX."""
    return _of_triton("ptxas-blackwell") or shutil.which("ptxas")


def assemble(ptx: str, arch: str) -> bytes:
    """The cubin of a kernel's PTX for ``arch``, such as "sm_103a"; PTX for a family is for each of its GPUs.

    Raises FileNotFoundError without an assembler, ValueError with its words if it refuses the PTX.
    """
    tool = ptxas()
    if tool is None:
        raise FileNotFoundError("inspect: ptxas is neither on the PATH nor in triton's package")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        done = subprocess.run([tool, "--gpu-name", arch, "-o", cubin, source], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"inspect: {tool} refuses PTX for {arch}: {done.stderr or done.stdout}")
        return cubin.read_bytes()


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


def sass(libraries: Sequence[Path], arch: str) -> list[str]:
    """The disassembly of the kernels in each library, all of them for ``arch``, a target of NVIDIA's.

    One run has the machine code of all libraries in a row: most of a run for one is the disassembler's start.
    """
    tool = nvdisasm()
    if tool is None:
        raise FileNotFoundError("inspect: nvdisasm is neither on the PATH nor in triton's package")
    codes = [b"".join(map(code, cubins(library))) for library in libraries]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [tool, "--binary", arch.upper(), file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"(?m)^ */\*[0-9a-f]{4,}\*/ .*", text)
    if len(lines) * _INSTRUCTION != sum(map(len, codes)):
        raise RuntimeError(f"inspect: {tool} has {len(lines)} lines for {sum(map(len, codes))} bytes of machine code")
    rest = iter(lines)
    return ["\n".join(itertools.islice(rest, len(code) // _INSTRUCTION)) for code in codes]


def overtaken(sass: str, machine_code: bytes) -> list[str]:
    """Arrivals at mbarriers, as lines of a disassembly, which loads of shared memory may still be on their way when
    they are made: no instruction up to there waits for what these load, and no fence stands between.

    ptxas counts on both being carried out in order. On an H200 they were not, and whoever waited for the arrival
    overwrote what was about to be loaded. What an instruction waits for, and what it announces, are bits 116 to 121 and
    110 to 112 of it. Instructions are taken in the order in which they stand, branches as if they were not taken.
    """
    found, loads = [], set()
    for i, line in enumerate(sass.splitlines()):
        bits = int.from_bytes(machine_code[i * _INSTRUCTION : (i + 1) * _INSTRUCTION], "little")
        loads = {b for b in loads if not bits >> 116 + b & 1}
        text = line.partition("*/")[2].split(";")[0].strip()
        if re.match(r"(FENCE\.VIEW\.ASYNC|MEMBAR|EXIT|BRA|RET)\b", text):
            loads = set()
        elif re.match(r"(@!?U?P\d )? *LDS", text) and (announced := bits >> 110 & 7) != 7:
            loads.add(announced)
        elif "SYNCS.ARRIVE" in text and loads:
            found.append(line.strip())
    return found


def code(cubin: bytes) -> bytes:
    """The executable sections of an ELF image, one after the other."""
    sections = ELFFile(io.BytesIO(cubin)).iter_sections()
    return b"".join(s.data() for s in sections if s["sh_flags"] & SH_FLAGS.SHF_EXECINSTR)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for kernel in resources(path):
            print(path.name, kernel)
