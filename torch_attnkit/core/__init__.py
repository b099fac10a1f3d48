"""The table and what turns it into operators. Read op.py, then dispatch.py. No kernel, no cutlass, no Metal here."""

from .errors import UnsupportedError
from .op import Call, Kernel, Op
from .target import Target, simulate

__all__ = ["Call", "Kernel", "Op", "Target", "UnsupportedError", "simulate"]
