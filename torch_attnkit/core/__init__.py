"""The table and what turns it into operators. Read op.py, then dispatch.py. No kernel, no cutlass, no Metal here."""

from .errors import UnsupportedError
from .invariance import batch_invariant, set_batch_invariant
from .op import Call, Kernel, Op
from .target import Target, simulate

__all__ = ["Call", "Kernel", "Op", "Target", "UnsupportedError", "batch_invariant", "set_batch_invariant", "simulate"]
