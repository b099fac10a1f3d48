"""From ``csrc/metal/<op>.metal`` to compiled kernels: include, specialise, compile, cache.

The text that hardware compiles and the text that the simulator runs are the same: our headers are pasted in here,
because torch's ``compile_shader`` finds only its own, and a kernel is specialised by ``#define`` lines before its
first line, because it has no function constants.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit import paths
from torch_attnkit.core import runtimes
from torch_attnkit.core.target import Target

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat", torch.float8_e4m3fn: "uchar"}
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+[<"](attnkit/[\w./-]+)[>"].*\n?', re.M)
_KERNEL = re.compile(r"(?:\bkernel|\[\[\s*kernel\b[^\]]*\]\])\s+void\s+(\w+)\s*\(([^{;]*)\)\s*\{")
_SLOT = re.compile(r"\[\[\s*buffer\(\s*(\d+)\s*\)\s*\]\]")
_stand_in: Callable[[str], Library] | None = None  # while recording


@dataclass(frozen=True)
class Library:
    """The kernels of one specialised source, and how many buffers each of them declares."""

    compiled: Any
    slots: dict[str, int]


def inline(text: str, seen: set[str] | None = None) -> str:
    """``text`` with every ``#include "attnkit/..."`` replaced by that header, each header once."""
    seen = set() if seen is None else seen

    def paste(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return "\n"
        seen.add(name)
        path = paths.metal_include() / name
        if not path.is_file():
            raise FileNotFoundError(f"Metal source includes {name}, but there is no {path}")
        return inline(path.read_text(encoding="ascii"), seen)

    return _INCLUDE.sub(paste, text)


def slots(text: str) -> dict[str, int]:
    """How many buffers each kernel of ``text`` declares; their indices must be 0, 1, 2 and so on."""
    found = {}
    for name, parameters in _KERNEL.findall(text):
        indices = [int(i) for i in _SLOT.findall(parameters)]
        if indices != list(range(len(indices))) or len(indices) > 31:
            raise ValueError(f"{name}: buffers {indices}, accepted: 0, 1, 2, ... in order, at most 31")
        found[name] = len(indices)
    return found


def source(op: str, defines: dict[str, Any]) -> str:
    """The whole text of an op's kernels, specialised: what ``compile_shader`` is given."""
    head = "".join(f"#define {name} {_word(value)}\n" for name, value in defines.items())
    return head + inline(paths.metal_source(op).read_text(encoding="ascii"))


def _word(value: Any) -> str:
    return TYPES[value] if isinstance(value, torch.dtype) else str(int(value))


@functools.cache
def _compile(text: str, simulated: bool) -> Library:
    return Library(runtimes.of("metal", simulated).compile_shader(text), slots(text))


def load(op: str, target: Target, **defines: Any) -> Library:
    """The kernels of ``op`` for a target; ``defines`` are dtypes, ints and bools, and become ``#define NAME value``."""
    text = source(op, defines)
    return _compile(text, target.simulated) if _stand_in is None else _stand_in(text)


@contextlib.contextmanager
def recording(stand_in: Callable[[str], Library]) -> Iterator[None]:
    """Inside this block nothing is compiled: ``load`` returns what ``stand_in`` makes of a specialised text."""
    global _stand_in
    outer, _stand_in = _stand_in, stand_in
    try:
        yield
    finally:
        _stand_in = outer
