"""Device side of flash_attention_varlen on Blackwell: ``cuda/sm100/prefill.py`` on packed sequences."""

from typing import Any

from torch_attnkit.cuda import fake, prefill_arguments
from torch_attnkit.cuda.sm100.prefill_kernel import prefill


def trace(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile."""
    kernel = prefill(dtype=fake.dtype(dtype), varlen=True, **signature)
    return kernel, prefill_arguments.packed(dtype, kernel.c)
