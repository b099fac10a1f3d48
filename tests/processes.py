"""Several processes on this machine: on its GPUs, one each, joined by NCCL, or on its CPU, joined by gloo."""

from __future__ import annotations

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PATIENCE = datetime.timedelta(minutes=5)  # of a collective: the other process may be compiling a kernel


def run(world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """What ``function(rank, *args)`` gave in each of ``world`` processes; raises what one of them raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (world, folder, backend, function, args), nprocs=world)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world)]


def _work(
    rank: int, world: int, folder: str, backend: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if backend == "nccl" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=_PATIENCE, device_id=gpu
    )
    torch.save(function(rank, *args), Path(folder) / str(rank))
    dist.barrier()  # who leaves first takes connections from who is still at work
    dist.destroy_process_group()


def device() -> torch.device:
    """Where the tensors of this process lie."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def attempted(function: Callable[..., Any], *args: Any) -> str:
    """What went wrong, or nothing: so that one process that fails does not leave the others waiting."""
    try:
        function(*args)
    except Exception:  # whatever it is, the test says it
        return traceback.format_exc()
    return ""
