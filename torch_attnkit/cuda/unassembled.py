"""CuTeDSL's compiler without its assembler: what only a simulator runs needs host code and PTX, and no machine code.

The passes of ``cute.compile`` assemble the PTX at once, which takes up to half of their time, and no option says
otherwise. But they write into the module what device code is to be made of: so they run up to that point, ``sass``
becomes ``ptx`` there, and the rest of them runs. Tried with the version that the PTX simulator is for.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

_MODULE, _TARGETS = "gpu.module", "compute_targets"


@contextlib.contextmanager
def unassembled() -> Iterator[None]:
    """Inside, what ``cute.compile`` makes holds PTX in place of machine code. Not for threads side by side."""
    from cutlass.base_dsl.compiler import Compiler

    whole = Compiler.compile

    def compile(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        first, second = stages(pipeline)
        hook, self._post_compile_hook = self._post_compile_hook, None  # the module is whole after the last stage
        try:
            whole(self, module, first, *args, **kwargs)
            _want_ptx(module)
            whole(self, module, second, *args, **kwargs)
        finally:
            self._post_compile_hook = hook
        return whole(self, module, pipeline, *args, **kwargs)

    Compiler.compile = compile
    try:
        yield
    finally:
        Compiler.compile = whole


def stages(pipeline: str) -> tuple[str, str]:
    """The passes before device code is made of a module, and the one that makes it, with the options of ``pipeline``.

    The whole pipeline, run after them, finds no device code to make, and finishes the host's.
    """
    level, dump = re.search(r"\bopt-level=\d", pipeline), re.search(r"\bdump-ptx-path='[^']*'", pipeline)
    if level is None or dump is None or "cute-to-nvvm{" not in pipeline:
        raise RuntimeError(f"passes of an unknown form: {pipeline}")
    before = pipeline.replace(level[0], f"{level[0]} llvm-only=true")
    return before, f"builtin.module(cuda-to-binary{{{level[0]} {dump[0]}}})"


def _want_ptx(module: Any) -> None:
    from cutlass._mlir import ir

    (device,) = (op for op in module.body.operations if op.operation.name == _MODULE)
    targets = str(device.attributes[_TARGETS])
    if "<sass," not in targets:
        raise RuntimeError(f"device code of an unknown kind: {targets}")
    with module.context:
        device.attributes[_TARGETS] = ir.Attribute.parse(targets.replace("<sass,", "<ptx,"))
