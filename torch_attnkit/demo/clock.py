"""How long the parts of a model take in which ops stand, to set beside those of eager."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

# Names of modules, by what a report calls them. Attention has its projections, which are the same on both sides.
PARTS = {"attention": ("self_attn",), "experts": ("experts",), "routers": ("router", "gate"), "gated norms": ("norm",)}
_GATED = "linear_attn"  # only there is a norm one of ours


class ModuleClock:
    """Seconds of this thread inside of the parts of ``model``, from its construction on."""

    def __init__(self, model: Any) -> None:
        self._calls: dict[tuple[str, str], list[float]] = defaultdict(list)  # of a module, by its part and name
        self._begun: list[float] = []
        for name, module in model.named_modules():
            *parents, last = name.split(".")
            for part, names in PARTS.items():
                if last in names and (part != "gated norms" or parents[-1:] == [_GATED]):
                    module.register_forward_pre_hook(self._begin)
                    module.register_forward_hook(self._end(part, name))

    def _begin(self, module: Any, args: Any) -> None:
        self._begun.append(time.thread_time())

    def _end(self, part: str, name: str) -> Any:
        def end(module: Any, args: Any, output: Any) -> None:
            self._calls[part, name].append(time.thread_time() - self._begun.pop())

        return end

    def step(self) -> dict[str, float]:
        """Seconds of each part in a step: of each module the median, which what else a machine does moves least."""
        seconds: dict[str, float] = defaultdict(float)
        for (part, _), calls in self._calls.items():
            seconds[part] += statistics.median(calls)
        return seconds


def ratios(ours: Mapping[str, float], eager: Mapping[str, float]) -> dict[str, float]:
    """Our seconds over eager's, for the parts that both have."""
    return {part: ours[part] / eager[part] for part in PARTS if ours.get(part) and eager.get(part)}
