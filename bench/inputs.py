"""The inputs of a line: cold sets of them, and weights that are made once for all lines of a model.

An op whose ``cases`` have ``layer`` (tensors that are the same for every number of tokens) and ``routed`` (the rest of
a call) gets one layer for all lines that agree in the sizes named by ``LAYER``. Its further sets are other tokens with
other routes through the same weights: a copy of the weights would cost gigabytes and warm nothing less.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from bench import timing
from bench.gate import tensors_of
from torch_attnkit.core.op import Op
from torch_attnkit.warmup import bench_inputs

Args = tuple[Any, ...]


@dataclass
class Inputs:
    op: Op
    dtype: torch.dtype
    device: str = "cuda"
    _sizes: tuple[int, ...] | None = field(default=None, init=False)
    _layer: Args = field(default=(), init=False)

    @property
    def cases(self) -> ModuleType:
        return self.op.module("cases")

    @property
    def shares(self) -> bool:
        return hasattr(self.cases, "layer")

    def first(self, dims: dict[str, int]) -> tuple[Args, dict[str, Any]]:
        """The arguments of a case, which the gate looks at."""
        if self.shares:
            return self._routed(dims, 0)
        with torch.device(self.device):
            return bench_inputs(self.op, dims, self.dtype, self._generator(0))

    def more(self, dims: dict[str, int], args: Args, count: int) -> list[Args]:
        """``count`` further sets."""
        if self.shares:
            return [self._routed(dims, variant)[0] for variant in range(1, count + 1)]
        return [timing.clones(args) for _ in range(count)]

    def touched(self, dims: dict[str, int], args: Args, got: Any) -> int:
        """Bytes that a call leaves in the cache."""
        if self.shares:
            return int(self.cases.bytes(dims, self.dtype))
        return sum(t.nbytes for t in (*tensors_of(args), *tensors_of(got)))

    def _routed(self, dims: dict[str, int], variant: int) -> tuple[Args, dict[str, Any]]:
        sizes = tuple(dims.get(name, 0) for name in self.cases.LAYER)
        with torch.device(self.device):
            if sizes != self._sizes:
                self._layer = ()  # before the next one is made: two may be too large
                self._layer, self._sizes = self.cases.layer(dims, self.dtype, self._generator(0)), sizes
            made: tuple[Args, dict[str, Any]] = self.cases.routed(
                dims, self.dtype, self._layer, self._generator(variant), variant
            )
        return made

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)
