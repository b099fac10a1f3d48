"""``python -m torch_attnkit sim metal``: whether the simulator works here, and what the package's kernels do in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_attnkit.core.errors import UnsupportedError
from torch_attnkit.core.target import simulate

from . import roofline
from .counters import Line, Report
from .library import MODES, compile_shader, counting, settings

app = typer.Typer(no_args_is_help=True, help="The simulators: what runs in them, and what it counts.")
console = Console()
_KNOWN = """#include <metal_stdlib>
using namespace metal;
kernel void known(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = simd_sum(s[63 - t]);
}
"""


@app.callback()
def _group() -> None:
    """Keeps ``metal`` a command of its own while it is the only one."""


def _self_test() -> None:
    kernel = compile_shader(_KNOWN).known
    for mode in MODES:
        x, out = torch.arange(64.0), torch.zeros(64)
        with settings(mode=mode):
            kernel(x, out)
        if out.tolist() != [1520.0] * 32 + [496.0] * 32:
            raise typer.Exit(1)
        console.print(f"{mode}: ok")


def reports_of(op: str | None = None) -> dict[str, list[Report]]:
    """Counters of every launch, by parity case, of the ops that have Metal rows."""
    from torch_attnkit import parity
    from torch_attnkit.core.dispatch import OPS

    if op is not None and op not in OPS:
        raise typer.BadParameter(f"no op {op!r}; there are: {', '.join(OPS)}")
    found: dict[str, list[Report]] = {}
    for name, o in OPS.items():
        for index, row in enumerate(o.kernels):
            if "metal" not in row.archs or op not in (None, name):
                continue
            for case in parity.cases(o, index, "metal", covering=True):
                with counting() as reports, simulate("metal"):
                    parity.run(case)
                found[case.id] = reports
    return found


def _ratio(lines: Sequence[Line], space: str) -> str:
    """Transactions over the fewest possible."""
    mine = [line for line in lines if line.space == space]
    ideal = sum(line.ideal for line in mine)
    return f"{sum(line.transactions for line in mine) / ideal:.2f}" if ideal else "-"


def print_counters(found: dict[str, list[Report]], by_line: bool = False) -> None:
    for case, reports in found.items():
        console.print(f"[bold]{escape(case)}[/bold]")
        for r in reports:
            buffers = ", ".join(f"{n} {read}+{written}" for n, (read, written) in r.buffers.items() if read or written)
            console.print(f"  {r.kernel}: {r.device_bytes} device bytes (read+written: {buffers})", highlight=False)
            console.print(
                f"    flops {r.flops}, in matrix units {r.matrix_flops}, special functions {r.special}, "
                f"barriers {r.barriers}, simdgroup barriers {r.simdgroup_barriers}, "
                f"collectives {r.collectives} ({r.divergent} divergent), "
                f"atomics {r.atomics}, device lines {_ratio(r.lines, 'device')} x ideal, "
                f"threadgroup rounds {_ratio(r.lines, 'threadgroup')} x ideal",
                highlight=False,
            )
        if reports:  # an empty call launches nothing
            console.print(f"    {roofline.line(reports)}", highlight=False)
    console.print("Counted in the simulator under its stated model; the times are bounds from a model of the chips.")
    for case, reports in found.items() if by_line else ():
        for r in reports:
            lines = Table(
                "line", "memory", "instructions", "bytes", "transactions", "ideal", "worst", "source", title=case
            )
            for x in r.lines:
                numbers = (x.instructions, x.bytes, x.transactions, x.ideal, x.worst)
                kind = f"{x.space} {'write' if x.write else 'read'}"
                lines.add_row(str(x.line), kind, *map(str, numbers), escape(x.text))
            console.print(lines)


def print_bars() -> None:
    """Our kernels beside PyTorch's: the bars, the counts behind them, and the bounds on time for three chips."""
    from . import bars

    measured = list(bars.pairs())
    table = Table("", "counted", "at most", "", title="Bars, counted in the simulator")
    for bar in bars.bars(measured):
        table.add_row(bar.what, f"{bar.value:.3f}", "-" if bar.most is None else f"{bar.most:g}", bar.verdict)
    console.print(table)
    sides = [(p.name, who, side) for p in measured for who, side in (("ours", p.ours), ("PyTorch's", p.torch))]
    table = Table("call", "kernels", *bars.counts(sides[0][2]), title="Counts")
    for name, who, side in sides:
        table.add_row(name, who, *(f"{n:,}" for n in bars.counts(side).values()))
    console.print(table)
    chips = [chip.name for chip in roofline.CHIPS]
    table = Table("call", "kernels", *chips, title="Least microseconds: modelled, not measured")
    for name, who, side in sides:
        found = (roofline.least(side.reports, chip) for chip in roofline.CHIPS)
        table.add_row(name, who, *(f"{us:.3g} ({what})" for us, what in found))
    console.print(table)


@app.command()
def metal(
    counters: Annotated[bool, typer.Option("--counters", help="Count what each kernel does.")] = False,
    lines: Annotated[
        bool, typer.Option("--lines", help="With --counters: memory instructions by source line.")
    ] = False,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    bars: Annotated[bool, typer.Option("--bars", help="Attention beside PyTorch's own kernels.")] = False,
) -> None:
    """Check the Metal simulator, or print exact counters of the package's Metal kernels on their parity cases."""
    if (op or lines) and not counters:
        raise typer.BadParameter("--op and --lines go with --counters")
    try:
        if bars:
            print_bars()
            return
        if not counters:
            _self_test()
            return
        found = reports_of(op)
    except UnsupportedError as error:
        console.print(str(error))
        raise typer.Exit(1) from None
    if not found:
        console.print("no op has a Metal kernel yet")
        return
    print_counters(found, lines)
