"""The toolkit of the CPU: kernels in C++ (``csrc/cpu``) for calls so small that PyTorch's operators, of which the same
takes ten or more, cost more than their numbers.

An option: where it is not built, ``kernels`` is None, and rows are PyTorch's operators alone. They take addresses of
float32 tensors and know nothing of torch, so that one build fits all its versions. A kernel that returns False refuses
the call, without a word: the row then goes on as if there were none.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

_NAME = f"{__name__}._kernels"


def _load() -> Any:
    try:
        return importlib.import_module(_NAME)
    except ImportError as error:
        if error.name != _NAME or not isinstance(error, ModuleNotFoundError):  # it is there
            warnings.warn(f"torch_attnkit: rows of the CPU are PyTorch's alone: {error}", RuntimeWarning, stacklevel=2)
        return None


kernels: Any = _load()


def address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
