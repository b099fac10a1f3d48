"""Which prefill kernel of Blackwell serves a head size. Imports cutlass."""

from typing import Any

from .prefill import Prefill
from .prefill_frame import Frame
from .prefill_types import Config
from .prefill_wide import WidePrefill
from .prefill_wide_types import WideConfig


def prefill(*, dim: int, **signature: Any) -> Frame:
    """The kernel that a signature asks for: the output of a head of 512 takes two CTAs."""
    if dim > 256:
        return WidePrefill(WideConfig(dim=dim, **signature))
    return Prefill(Config(dim=dim, **signature))
