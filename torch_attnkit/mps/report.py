"""What a Mac found, as a file that can be sent in: the machine, the known answer, parity, times.

Everything here is read from the machine that runs it; on others the facts that only macOS has are "unknown".
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import torch_attnkit
from torch_attnkit.core.target import Target

from . import known_answer

FORMAT = 2


def sysctl(name: str) -> str:
    try:
        found = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """The GPU, the system and the versions; ``virtual`` is "1" in a virtual machine."""
    gpu = getattr(torch._C, "_mps_get_name", None)
    cores = getattr(torch._C, "_mps_get_core_count", None)
    return {
        "gpu": gpu() if gpu else sysctl("machdep.cpu.brand_string"),
        "gpu_cores": cores() if cores else "unknown",
        "model": sysctl("hw.model"),
        "memory_bytes": sysctl("hw.memsize"),
        "virtual": sysctl("kern.hv_vmm_present"),
        "macos": platform.mac_ver()[0] or "unknown",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {"torch_attnkit": torch_attnkit.__version__, "torch": torch.__version__},
    }


def begin(target: Target, device: str, what: str) -> dict[str, Any]:
    """A report on ``what``, "parity" or "bench", with everything that is known before the first case has run."""
    return {
        "format": FORMAT,
        "what": what,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "-m", Path(sys.argv[0]).parent.name, *sys.argv[1:]]),
        "target": str(target),
        "machine": machine(),
        "known_answer_wrong": known_answer.wrong(target, device),
    }


def trusted(report: dict[str, Any]) -> str:
    """Empty, or why nothing that this GPU computes says something about our kernels."""
    wrong = report["known_answer_wrong"]
    if not wrong:
        return ""
    virtual = " It is a virtual machine's." if report["machine"]["virtual"] == "1" else ""
    return f"this GPU gets a known answer wrong, so no case was run.{virtual} " + "; ".join(wrong)


def write(report: dict[str, Any], file: Path) -> str:
    """Write the file; returns what to tell its user."""
    file.write_text(json.dumps(report, indent=1) + "\n")
    gpu, macos = report["machine"]["gpu"], report["machine"]["macos"]
    return (
        f"wrote {file}: please send it in, whatever it says. Attach it to an issue of this project, titled"
        f' "{report["what"]} on {gpu}, macOS {macos}"; docs/mac.md says what is in it and which other files help'
    )


def default_file(what: str) -> Path:
    return Path(f"torch_attnkit-{what}-{datetime.date.today().isoformat()}.json")
