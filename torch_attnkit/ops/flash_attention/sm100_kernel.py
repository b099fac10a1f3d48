"""Device side of flash_attention on Blackwell: ``cuda/sm100/prefill.py`` on dense batches."""

from typing import Any

from torch_attnkit.cuda import fake, prefill_arguments
from torch_attnkit.cuda.sm100.prefill import Prefill
from torch_attnkit.cuda.sm100.prefill_types import Config


def trace(arch: str, *, dtype: str, **signature: Any) -> tuple[Any, list[Any]]:
    """What to compile."""
    config = Config(dtype=fake.dtype(dtype), **signature)
    return Prefill(config), prefill_arguments.dense(dtype, config)
