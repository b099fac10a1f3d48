"""Several processes on this machine, joined by gloo: what a test does on many GPUs, on a CPU."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(rank, *args)`` gave in each of ``world`` processes; raises what one of them raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world, folder, function, args), nprocs=world)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world)]


def _work(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(function(rank, *args), Path(folder) / str(rank))
    dist.destroy_process_group()


def attempted(function: Callable[..., Any], *args: Any) -> str:
    """What went wrong, or nothing: so that one process that fails does not leave the others waiting."""
    try:
        function(*args)
    except Exception:  # whatever it is, the test says it
        return traceback.format_exc()
    return ""
