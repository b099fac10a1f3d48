"""How scores become weights: the part of a problem that all attention families share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LOG2_E = math.log2(math.e)
MOST = 1 << 30  # windows and sink counts above every length mean "all"; sums of them with positions stay in 32 bits


@dataclass(frozen=True)
class Scores:
    """Scale, cap, window and sink tokens as in an op's arguments; ``dim`` is D."""

    dim: int
    scale: float | None = None  # None: dim ** -0.5
    softcap: float = 0.0  # 0: none
    window: int = -1  # -1: none
    sink_tokens: int = 0

    @classmethod
    def of(cls, dim: int, arguments: Any) -> Scores:
        """Those that an op's arguments say."""
        return cls(dim, *(getattr(arguments, name) for name in ("scale", "softcap", "window", "sink_tokens")))

    @property
    def factor(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def capped(self) -> bool:
        return self.softcap > 0

    @property
    def slope(self) -> float:
        """What a product of q and k is multiplied by: before the cap, if there is one."""
        return self.factor / self.softcap if self.capped else self.factor

    @property
    def bounds(self) -> tuple[int, int]:
        """Window, -1 without one, and sink tokens."""
        return min(self.window, MOST), min(self.sink_tokens, MOST)

    def most_keys(self, keys: int, queries: int = 1, *, both_sides: bool = False) -> int:
        """How many of ``keys`` keys a block of ``queries`` queries sees at most."""
        window, sinks = self.bounds
        return keys if window < 0 else min(keys, window * (1 + both_sides) + queries - 1 + sinks)

    def features(self) -> dict[str, bool]:
        """The part of a kernel's signature that says what its scores take."""
        on = self.window >= 0
        return {"window": on, "sink_tokens": on and self.sink_tokens > 0, "softcap": self.capped}
