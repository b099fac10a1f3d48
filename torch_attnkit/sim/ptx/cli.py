"""``python -m torch_attnkit sim ptx``: whether the simulator works here, and what the package's kernels do in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.core.target import NVIDIA

from .counters import print_roofline
from .runtime import machine
from .settings import counting, settings

console = Console()
# Each of 64 threads stores the number that its neighbour put into shared memory.
_KNOWN = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry known(.param .u64 out)
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<4>;
  .shared .align 4 .b8 numbers[256];
  mov.u32 %r1, %tid.x;
  xor.b32 %r2, %r1, 1;
  mov.u32 %r3, numbers;
  shl.b32 %r4, %r1, 2;
  add.s32 %r4, %r3, %r4;
  st.shared.u32 [%r4], %r1;
  bar.sync 0;
  shl.b32 %r5, %r2, 2;
  add.s32 %r5, %r3, %r5;
  ld.shared.u32 %r5, [%r5];
  ld.param.u64 %rd1, [out];
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r5;
  ret;
}
"""


def _self_test() -> None:
    kernel = machine().Module(_KNOWN).kernel("known")
    for check in (False, True):
        out = torch.zeros(64, dtype=torch.int32)
        begin = out.data_ptr()
        result = kernel.launch(
            grid=(1, 1, 1), block=(64, 1, 1), cluster=(1, 1, 1), dynamic_shared=0, params=begin.to_bytes(8, "little"),
            ranges=[(begin, begin + 256, True, "out")], check=check,
        )  # fmt: skip
        if out.tolist() != [i ^ 1 for i in range(64)] or result.reports:
            raise typer.Exit(1)
        console.print(f"{'checked' if check else 'fast'}: ok")


def _cases(op: str | None, arch: str | None) -> Iterator[Any]:
    """The covering parity cases of the rows that CuTeDSL compiles."""
    from torch_attnkit import parity
    from torch_attnkit.core.dispatch import OPS

    if op is not None and op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are: {', '.join(OPS)}")
    if arch is not None and arch not in NVIDIA:
        raise typer.BadParameter(f"arch is {arch!r}, accepted: {', '.join(NVIDIA)}")
    for name, record in OPS.items():
        for index, row in enumerate(record.kernels):
            for target in row.archs:
                if op in (None, name) and target in NVIDIA and arch in (None, target):
                    yield from parity.cases(record, index, target, covering=True)


def _check(op: str | None, arch: str | None, seeds: int, waive: tuple[str, ...]) -> int:
    """Run every case checked, under each schedule; the number of failures. What is waived is printed with each case."""
    from torch_attnkit import parity

    failures = 0
    for case in _cases(op, arch):
        for seed in range(seeds + 1):
            try:
                with settings(check=True, seed=seed, waive=waive), counting() as launches:
                    worst = parity.run(case)
                notes = (n.splitlines()[0] for launch in launches for n in launch.notes)
                waived = [n.removeprefix("note: ") for n in notes if n.startswith("note: waived:")]
                right = "refused" if worst is None else f"{worst:.2f} of the tolerance"
                message = "; ".join([right, *dict.fromkeys(waived)])
            except (AssertionError, RuntimeError) as error:
                failures += 1
                message = f"[red]{escape(str(error))}[/red]"
            console.print(f"{escape(case.id)} schedule {seed}: {message}", highlight=False, soft_wrap=True)
    console.print(f"{failures} failures")
    return failures


def ptx(
    counters: Annotated[bool, typer.Option("--counters", help="Count what each kernel does, with a roofline.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Run the parity cases with every check on.")] = False,
    seeds: Annotated[int, typer.Option(help="With --check: hostile schedules besides the plain one.", min=0)] = 0,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    arch: Annotated[str | None, typer.Option(help=f"Only one of {', '.join(NVIDIA)}.")] = None,
    waive: Annotated[list[str] | None, typer.Option(help="With --check: a kind of finding that is not raised.")] = None,
) -> None:
    """Check the PTX simulator, or run the package's CuTeDSL kernels in it on their parity cases."""
    waived = tuple(waive or ())
    try:
        with settings(waive=waived):
            pass
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if waived and not check:
        raise typer.BadParameter("--waive goes with --check")
    if seeds and not check:
        raise typer.BadParameter("--seeds goes with --check")
    if (op or arch) and not (check or counters):
        raise typer.BadParameter("--op and --arch go with --check or --counters")
    try:
        if check and _check(op, arch, seeds, waived):
            raise typer.Exit(1)
        if counters:
            from torch_attnkit import parity

            for case in _cases(op, arch):
                with counting() as launches:
                    parity.run(case)
                print_roofline(console, escape(case.id), launches)
        if not check and not counters:
            _self_test()
    except UnsupportedError as error:
        console.print(str(error))
        raise typer.Exit(1) from None
