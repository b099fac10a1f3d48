"""PyTorch operators for the attention, norm, routing, FP4 and mixture-of-experts steps of language models.

Importing the package defines ``torch.ops.attnkit.*`` and nothing else: it patches nothing and compiles nothing.
"""

from typing import TYPE_CHECKING

from torch_attnkit import backends
from torch_attnkit.core import Target, UnsupportedError, dispatch, simulate
from torch_attnkit.core.support import explain, support

if TYPE_CHECKING:
    from torch_attnkit.trace import record

__version__ = "0.1.0"

backends.register()
_LIBRARY = dispatch.load("torch_attnkit.ops")

__all__ = ["Target", "UnsupportedError", "explain", "record", "simulate", "support"]


def __getattr__(name: str) -> object:
    if name == "record":  # pulls in torch.utils, which plain use of the ops does not need
        from torch_attnkit.trace import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
