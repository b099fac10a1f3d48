"""Runs CuTeDSL's passes in two stages: host code and PTX, then machine code, which a simulator does not need.

``cute.compile`` assembles PTX in the same pipeline, half of its time, and has no option to leave that out. Its passes
write the target of device code into the module: they run up to that point, for a simulator ``sass`` is replaced by
``ptx`` there, and the rest runs. Host code is the same either way, and so is its fingerprint (``fingerprint.py``); for
a simulator its machine code is not optimised. Tried with the version that the PTX simulator supports; where the passes
have another form, a GPU's kernels are compiled in one stage and a simulator's are refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

_MODULE, _TARGETS = "gpu.module", "compute_targets"


@contextlib.contextmanager
def in_stages(*, assembled: bool) -> Iterator[None]:
    """Inside, ``cute.compile`` works in stages. What it makes holds machine code if it is ``assembled``, else PTX.

    ``export_to_c`` belongs inside, too. Not for threads side by side.
    """
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.cutlass_dsl import tvm_ffi_provider as exporter

    whole, support = Compiler.compile, exporter._aot_support

    def compile(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        found = stages(pipeline)
        if found is None and not assembled:
            raise RuntimeError(f"passes of an unknown form: {pipeline}")
        hook, self._post_compile_hook = self._post_compile_hook, None  # the module is whole after the last stage
        try:
            for stage in found or ():
                whole(self, module, stage, *args, **kwargs)
                if not assembled and stage is found[0]:
                    _want_ptx(module)
        finally:
            self._post_compile_hook = hook
        return whole(self, module, pipeline, *args, **kwargs)

    Compiler.compile = compile
    if not assembled:
        exporter._aot_support = _Unoptimised(support)
    try:
        yield
    finally:
        Compiler.compile, exporter._aot_support = whole, support


class _Unoptimised:
    """Makes objects of host code as it is: a simulator's launches are too few to repay what optimising it costs."""

    def __init__(self, support: Any):
        self._support = support

    def export_module_to_bytes(self, module: Any, **how: Any) -> Any:
        return self._support.export_module_to_bytes(module, **how | {"opt_level": 0})


def stages(pipeline: str) -> tuple[str, str] | None:
    """The passes before device code is made of a module, and the one that makes it, with the options of ``pipeline``.

    The whole pipeline, run after them, finds no device code to make, and finishes the host's. None: of another form.
    """
    level, dump = re.search(r"\bopt-level=\d", pipeline), re.search(r"\bdump-ptx-path='[^']*'", pipeline)
    if level is None or dump is None or "cute-to-nvvm{" not in pipeline:
        return None
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
