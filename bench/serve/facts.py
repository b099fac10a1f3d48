"""What a reader needs to repeat a run of ``bench.serve``."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import platform
from typing import Any

import torch

_NAMED = ("vllm", "transformers", "triton_kernels")


def of(device: str) -> dict[str, Any]:
    """The device, versions, commit and date, of a process that has vLLM."""
    if device == "cpu":
        record = {"device": "CPU", "python": platform.python_version(), "versions": {"torch": torch.__version__}}
        record["date"] = datetime.date.today().isoformat()
    else:
        from bench.__main__ import facts

        record = facts()
        record["gpus"] = torch.cuda.device_count()
    for name in _NAMED:
        with contextlib.suppress(Exception):  # one that cannot be imported was not used
            record["versions"][name] = getattr(importlib.import_module(name), "__version__", "unknown")
    return record
