"""The simulator for arm64, compiled and linked here: what has to run on an Arm machine is at least complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_attnkit.mps import library
from torch_attnkit.paths import csrc
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal import compiler

pytestmark = pytest.mark.simulator
ELF_ARM64 = 183  # e_machine
SOURCES = {
    "decode": ("sdpa_decode", dict(TYPE=torch.bfloat16, OUT_TYPE=torch.float32, MERGED_TYPE=torch.bfloat16, DIM=64,
                                   DIM_V=64, TILES=2, WIDTH=4, CODES=0)),
    "prefill": ("flash_attention", dict(TYPE=torch.float16, OUT_TYPE=torch.float16, CODES=0, DIM=64, DIM_V=64, TILES=2,
                                        SIMDS=4, KEYS=16, WIDTH=4, IN_CACHE=0)),
}  # fmt: skip


@pytest.mark.parametrize("mode", metal.library.MODES)
@pytest.mark.parametrize("name", SOURCES)
def test_kernels_compile_for_arm64(name: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler.platform, "machine", lambda: "aarch64")
    compiler._tools_key.cache_clear()
    compiler._stub.cache_clear()
    try:
        text = compiler.embed(library.source(*SOURCES[name]))
        unit = compiler.check(text, 320)
        for entry in unit.entries:
            built = compiler.build(text, unit, entry, compiler.Variant(mode), 320)
            head = built.path.read_bytes()[:20]
            assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == ELF_ARM64
    finally:
        compiler._tools_key.cache_clear()
        compiler._stub.cache_clear()


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
@pytest.mark.parametrize("name", ["fiber", "launch"])
def test_the_machine_compiles_for_arm64(name: str, target: str, tmp_path: Path):
    """The files with assembly, signals and contexts in them, which differ between processors and systems."""
    folder = csrc() / "sim" / "metal"
    flags = ["-target", target, "-std=c++17", "-O0", "-Werror"]
    command = [sys.executable, "-m", "ziglang", "c++", *flags, "-c", str(folder / f"{name}.cpp"), "-o", "x.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
