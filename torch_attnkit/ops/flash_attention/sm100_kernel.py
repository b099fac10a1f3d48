"""Device side of flash_attention on Blackwell: ``cuda/sm100/prefill.py`` on dense batches."""

from typing import Any

from torch_attnkit.cuda import fake, prefill_arguments
from torch_attnkit.cuda.sm100.prefill_kernel import prefill


def trace(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile."""
    kernel = prefill(dtype=fake.dtype(dtype), **signature)
    return kernel, prefill_arguments.dense(dtype, kernel.c)
