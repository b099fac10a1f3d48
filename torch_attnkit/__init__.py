"""PyTorch operators for the attention, norm, routing, FP4 and mixture-of-experts steps of language models.

Importing the package defines ``torch.ops.attnkit.*`` and nothing else: it patches nothing and compiles nothing.
"""

import sys
from typing import TYPE_CHECKING

import torch

from torch_attnkit import arguments, backends, flops, sharding
from torch_attnkit.core import Target, UnsupportedError, batch_invariant, dispatch, set_batch_invariant, simulate
from torch_attnkit.core.support import explain, support

if TYPE_CHECKING:
    from torch_attnkit.manual import describe
    from torch_attnkit.trace import record

__version__ = "0.1.0"

backends.register()
_LIBRARY = dispatch.load("torch_attnkit.ops")
for _op in dispatch.OPS.values():  # help(torch.ops.attnkit.sdpa_decode)
    getattr(torch.ops.attnkit, _op.name).__doc__ = (
        f"{sys.modules[_op.package + '.op'].__doc__ or ''}\n{_op.schema}\n\n"
        f"{arguments.listed(_op)}\n\n{arguments.CONTENTS}\n"
        f"torch_attnkit.describe({_op.name!r}) also has limits, refusals and where an example is."
    )
flops.register_when_imported()
sharding.register_when_imported()

__all__ = [
    "Target", "UnsupportedError", "batch_invariant", "describe", "explain", "record", "set_batch_invariant", "simulate",
    "support",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "record":  # pulls in torch.utils, which plain use of the ops does not need
        from torch_attnkit.trace import record

        return record
    if name == "describe":  # pulls in what reads evidence
        from torch_attnkit.manual import describe

        return describe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
