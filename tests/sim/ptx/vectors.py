"""Outputs of the sm90 rows as an H200 gave them, small, for the simulator to be compared with.

On a machine with a Hopper GPU, in the repository: ``python tests/sim/ptx/vectors.py`` writes tests/data/sm90/vectors.pt
anew, by as many processes as there are cores, since compiling is what takes time. A kernel whose arithmetic changes on
purpose needs that; ``--new`` adds the rows that it lacks.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import torch_attnkit
from torch_attnkit import parity, simulate
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.spec import DTYPES

FILE = Path(__file__).resolve().parents[2] / "data/sm90/vectors.pt"
SAMPLES = 128  # elements kept of each output, evenly spread
SAME_ORDER = ("gated_rmsnorm", "merge_partials")  # no tensor cores: the order of every sum is the kernel's own
OTHERS = 3  # cases of the other rows
MOST_PROCESSES = 16  # that share the GPU


@dataclass(frozen=True)
class Call:
    """What was called, with the sizes of the shape as they were then: inputs do not follow a change of ``cases.py``."""

    op: str
    dtype: str
    dims: dict[str, int]
    features: list[str]
    shape: str
    sizes: dict[str, int]


def chosen() -> list[parity.Case]:
    """Ordinary covering cases of every sm90 row: all where the order of summation is fixed, else the first few."""
    found = []
    for name, op in OPS.items():
        for index, row in enumerate(op.kernels):
            if "sm90" in row.archs:
                taken = [c for c in parity.cases(op, index, "sm90", covering=True) if returns(c)]
                found += taken if name in SAME_ORDER else taken[:OTHERS]
    return found


def returns(case: parity.Case) -> bool:
    """Whether the op returns something for an ordinary case."""
    call = parity.bound(OPS[case.op], *parity.arguments(case))
    return not case.extra and any(0 not in shape for shape, _ in OPS[case.op].outputs(call))


def call_of(case: parity.Case) -> Call:
    sizes = parity.shapes(OPS[case.op])[case.shape]
    return Call(case.op, case.dtype, dict(case.dims), list(case.features), case.shape, sizes)


def arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = (DTYPES[call.dtype], tuple(call.features), tuple(call.dims.items()))
    return parity.generate(OPS[call.op], call.shape, call.sizes, *given)


def row_of(call: Call) -> int:
    """The op's sm90 row that takes a call."""
    op = OPS[call.op]
    each = (i for i, row in enumerate(op.kernels) if "sm90" in row.archs and row.refusal(bound(call)) is None)
    return next(each)


def bound(call: Call) -> Any:
    return parity.bound(OPS[call.op], *arguments(call))


def digest(call: Call) -> int:
    """A number of the inputs: the same on every machine, or the comparison means nothing."""
    args, kwargs = arguments(call)
    found = zlib.crc32(repr(sorted(kwargs.items())).encode())
    for t in (a.contiguous() for a in args if isinstance(a, torch.Tensor)):
        found = zlib.crc32(ctypes.string_at(t.data_ptr(), t.nbytes), found)
    return found


def outputs(call: Call, device: str) -> list[torch.Tensor]:
    """Samples of what the op returns, on the GPU or in the simulator."""
    args, kwargs = arguments(call)
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    op = getattr(torch.ops.attnkit, call.op)
    if device == "cpu":
        with simulate("sm90"):
            out = op(*moved, **kwargs)
    else:
        out = op(*moved, **kwargs)
    flat = [t.cpu().flatten() for t in ((out,) if isinstance(out, torch.Tensor) else out)]
    return [t[:: max(1, -(-t.numel() // SAMPLES))].clone() for t in flat]


def tolerances(call: Call) -> list[float]:
    """What oracle/compare.py allows each output: indices and codes are exact."""
    args, kwargs = arguments(call)
    op = OPS[call.op]
    sums = parity.arithmetic_of(op, "sm90", args, kwargs)
    pairs = zip(*(parity.reference_of(op, args, kwargs, double=d, arithmetic=sums) for d in (False, True)), strict=True)
    found = []
    for (_, dtype), (ref, ref64) in zip(op.outputs(bound(call)), pairs, strict=True):
        if not dtype.is_floating_point:
            found.append(0.0)
            continue
        finite = ref.isfinite()
        r, r64 = ref[finite].double(), ref64[finite].double()
        eps = torch.finfo(dtype).eps
        found.append((2 * (r - r64).abs().max() + 4 * eps * r64.abs().max()).item() if r.numel() else 0.0)
    return found


def recorded(call: Call) -> dict[str, Any]:
    return {"call": asdict(call), "inputs": digest(call), "outputs": outputs(call, "cuda")}


def record(*, new: bool) -> None:
    """``new``: only rows of which nothing is recorded yet."""
    if torch.cuda.get_device_capability() != (9, 0):
        sys.exit(f"vectors: needs a Hopper GPU, found {torch.cuda.get_device_name()}")
    calls = {c.id: call_of(c) for c in chosen()}
    before = torch.load(FILE, weights_only=True)["cases"] if new else {}
    rows = {(old["call"]["op"], row_of(Call(**old["call"]))) for old in before.values()}
    calls = {name: call for name, call in calls.items() if (call.op, row_of(call)) not in rows}
    with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), get_context("spawn")) as pool:
        cases = before | dict(zip(calls, pool.map(recorded, calls.values()), strict=True))
    FILE.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__.split("+")[0], "torch_attnkit": torch_attnkit.__version__},
            "cases": cases,
        },
        FILE,
    )
    print(f"{len(cases)} cases, {FILE.stat().st_size} bytes in {FILE}")


if __name__ == "__main__":
    record(new=sys.argv[1:] == ["--new"])
