"""Nsight Compute: which counters are asked for, how it is started, and what its CSV says of each launch."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What is asked for, and what ncu calls it; of several names the first that the chip has.
_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
METRICS: dict[str, tuple[str, ...]] = {
    "us": ("gpu__time_duration.sum",),
    "dram_read": ("dram__bytes_read.sum",),
    "dram_write": ("dram__bytes_write.sum",),
    "l2_to_sm": ("l1tex__m_xbar2l1tex_read_bytes.sum", "lts__t_sectors_srcunit_tex_op_read.sum"),
    "dram": (f"gpu__dram_throughput{_ELAPSED}", f"dram__throughput{_ELAPSED}"),
    "l2": (f"lts__t_sectors{_ELAPSED}",),
    "tensor": (
        f"sm__pipe_tensor_cycles_active{_ELAPSED}",
        f"sm__pipe_tensor_op_hmma_cycles_active{_ELAPSED}",
        f"sm__inst_executed_pipe_tensor{_ELAPSED}",
    ),
    "issue": (f"sm__inst_issued{_ELAPSED}", f"sm__inst_executed{_ELAPSED}"),
    "xu": (f"sm__inst_executed_pipe_xu{_ELAPSED}",),
    "fma": (f"sm__pipe_fma_cycles_active{_ELAPSED}", f"sm__inst_executed_pipe_fma{_ELAPSED}"),
    "alu": (f"sm__inst_executed_pipe_alu{_ELAPSED}", f"sm__pipe_alu_cycles_active{_ELAPSED}"),
    "sm_active": (f"sm__cycles_active{_ELAPSED}",),
    "warps": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "ghz": ("sm__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second"),
    "registers": ("launch__registers_per_thread",),
    "smem": ("launch__shared_mem_per_block",),
}
SUMS = ("us", "dram_read", "dram_write", "l2_to_sm")
LIMITS = {"dram": "DRAM", "l2": "L2", "tensor": "tensor", "issue": "issue", "xu": "XU", "fma": "FMA", "alu": "ALU"}
MEANS = (*LIMITS, "sm_active", "warps", "ghz")  # over the time of the launches
_SECTOR = 32  # bytes
# Into microseconds, bytes, GHz.
_UNITS = {
    "nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "sector": _SECTOR,
    "hz": 1e-9, "mhz": 1e-3, "ghz": 1.0, "cycle/second": 1e-9, "cycle/s": 1e-9, "cycle/nsecond": 1.0, "cycle/ns": 1.0,
}  # fmt: skip

# Of templates that only wrap a kernel; of the names of CuTeDSL's kernels what follows the kernel's own.
_WRAPPERS = ("device_kernel", "Kernel", "Kernel2", "enable_sm90", "enable_sm90_or_later", "enable_sm80_to_sm89")
_ARGUMENTS = r"_(?:object_at|tensorptr|TensorMap|CopyAtom|TiledMMA|Tensor|tensor0000)"


def tool() -> str:
    found = shutil.which("ncu") or next(map(str, sorted(Path("/usr/local").glob("cuda*/bin/ncu"), reverse=True)), None)
    if found is None:
        raise FileNotFoundError("no ncu: Nsight Compute is part of the CUDA toolkit")
    return found


def available(ncu: str, also: Iterable[str] = ()) -> dict[str, str]:
    """The metrics by their names here: of each the first that this chip has, and those of ``also`` as they are."""
    asked = subprocess.run([ncu, "--query-metrics", "--devices", "0"], capture_output=True, text=True).stdout
    listed = set(re.findall(r"^(\w+__\w+)", asked, re.M))
    named = {}
    for name, candidates in METRICS.items():
        known = (c for c in candidates if c.startswith("launch__") or c.split(".")[0] in listed or not listed)
        if (metric := next(known, None)) is not None:
            named[name] = metric
    return named | {metric: metric for metric in also}


def command(ncu: str, names: dict[str, str], report: Path) -> list[str]:
    """What goes ahead of a command: its kernels between the driver's marks for profilers, into the CSV ``report``."""
    return [
        ncu, "--target-processes", "application-only", "--profile-from-start", "off", "--replay-mode", "kernel",
        "--cache-control", "all", "--clock-control", "none", "--metrics", ",".join(names.values()),
        "--csv", "--page", "raw", "--print-units", "base", "--force-overwrite", "--log-file", str(report),
    ]  # fmt: skip


def launches(text: str, names: dict[str, str], mark: str) -> list[list[dict[str, Any]]]:
    """The launches after each one whose kernel is named ``mark``; ``names`` are the metrics by what they are here."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = csv.DictReader(lines[start:])
    units: dict[str, str] = {}
    calls: list[list[dict[str, Any]]] = []
    for row in rows:
        if not row["ID"]:
            units = row
        elif mark in row["Kernel Name"]:
            calls.append([])
        elif calls:
            calls[-1].append(_launch(row, units, names))
    return calls


def _launch(row: dict[str, str], units: dict[str, str], names: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": short(row["Kernel Name"])}
    for what in ("Grid Size", "Block Size"):
        found[what.split()[0].lower()] = [int(n) for n in re.findall(r"\d+", row.get(what, ""))]
    for name, metric in names.items():
        try:
            number = float(row[metric].replace(",", ""))
        except (KeyError, ValueError):  # n/a, or a metric that ncu did not have
            continue
        unit = units.get(metric, "").lower().removesuffix("/block")
        found[name] = number * _UNITS.get(unit, 1.0)
    return found


def short(name: str) -> str:
    """A kernel's name without its types: the last part of a C++ name, of a template's argument where it is only a
    wrapper, and of a CuTeDSL kernel what comes ahead of its arguments."""
    if "cutlass_" in name and "::" not in name:
        return re.split(_ARGUMENTS, name.removeprefix("kernel_cutlass_").removeprefix("kernel_"))[0][-60:]
    name = re.sub(r"\(anonymous namespace\)|<unnamed>|\{anonymous\}", "", name).removeprefix("void ")
    parts: list[str] = re.findall(r"(\w+)(?=[<(>,]|$)", name)
    return next((part for part in parts if part not in _WRAPPERS), name)[:60]


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One call's numbers, from those of its launches."""
    total: dict[str, Any] = {name: sum(x.get(name, 0.0) for x in found) for name in SUMS}
    for name in MEANS:
        having = [x for x in found if name in x and x.get("us")]
        time_ = sum(x["us"] for x in having)
        if time_:
            total[name] = sum(x[name] * x["us"] for x in having) / time_
    at = {word: total[name] for name, word in LIMITS.items() if name in total}
    if at:
        total["nearest"] = max(at, key=lambda word: at[word])
    return total
