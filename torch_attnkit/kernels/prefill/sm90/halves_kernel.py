"""What to compile for wide heads on Hopper: the kernel of ``prefill.py`` with other consumers."""

from __future__ import annotations

from typing import Any

from torch_attnkit.cuda import fake

from .. import arguments
from .halves import Config, Epilogue, Mainloop
from .prefill import Prefill


def _kernel(config: Config) -> Prefill:
    """Its scheduler, producer, masks and order of blocks are the same for all heads."""
    kernel = Prefill(config)
    # The producer of packed pairs spills with the 24 registers that it has beside consumers of 240.
    kernel.regs_load, kernel.regs_mma = 40, 232
    mainloop = Mainloop(config)
    kernel.mainloop, kernel.epilogue = mainloop, Epilogue(config, mainloop)
    return kernel


def trace_dense(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For batches of sequences."""
    config = Config(dtype=fake.dtype(dtype), **signature)
    return _kernel(config), arguments.dense(dtype, config)


def trace_packed(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """For sequences one after another."""
    config = Config(dtype=fake.dtype(dtype), varlen=True, **signature)
    return _kernel(config), arguments.packed(dtype, config)
