"""Split workspace in device memory: partial results and arrival counters of the CTAs of one launch.

The memory belongs to a stream, not to a call: launches on a stream run in order and share it, and each leaves every
counter at zero. A captured graph may be replayed beside anything: its calls get partials from the graph's own pool, and
counters that no other call uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_COUNTERS = 1 << 22  # of one device, 16 MB: those of the eager streams and of some thousand captured calls


@dataclass(frozen=True)
class SplitLayout:
    """A split in the workspace, fp32: O (heads, Dv), then row_max and row_sum (heads, 2)."""

    heads: int
    dim_v: int

    @property
    def floats(self) -> int:
        return self.heads * (self.dim_v + 2)

    @property
    def nbytes(self) -> int:
        return self.floats * 4

    def output_at(self, head: Any, column: Any) -> Any:
        """Byte offset of a head's O in a split."""
        return (head * self.dim_v + column) * 4

    def stat_at(self, head: Any) -> Any:
        return (self.heads * self.dim_v + head * 2) * 4


class _Device:
    """Of one device: zeroed counters, each given out a single time, and the workspace of its streams."""

    def __init__(self, device: torch.device):
        self.device = device
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.used = 0
        self.streams: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the zeros are there before another stream counts on them

    def take(self, count: int) -> torch.Tensor:
        """``count`` counters that are zero and belong to the caller from now on."""
        if self.used + count > self.counters.numel():
            if _capturing():  # a fill that the graph repeats: slower, and always right
                return torch.zeros(count, dtype=torch.int32, device=self.device)
            self.__init__(self.device)  # the old counters live on in those who took them
        self.used += -(-count // 32) * 32
        return self.counters[self.used - -(-count // 32) * 32 :][:count]

    def grow(self, stream: int, floats: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts, counters = self.streams.get(stream, (None, None))
        if parts is None or parts.numel() < floats:
            parts = torch.empty(floats, dtype=torch.float32, device=self.device)
        if counters is None or counters.numel() < count:
            counters = self.take(count)
        self.streams[stream] = parts, counters
        return parts, counters


_devices: dict[torch.device, _Device] = {}


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Workspace:
    """Partial results and arrival counters for the launches of one plan."""

    def __init__(self, device: torch.device, floats: int, counters: int):
        self.device, self.floats, self.counters = device, floats, counters
        self.index = device.index or 0

    def get(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(floats, counters) for one launch on the current stream; the counters are zero and must be left so."""
        held = _devices.get(self.device)
        if held is None:
            held = _devices[self.device] = _Device(self.device)
        if self.device.type != "cuda":
            return held.grow(0, self.floats, self.counters)
        if torch._C._cuda_isCurrentStreamCapturing():
            return torch.empty(self.floats, dtype=torch.float32, device=self.device), held.take(self.counters)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        found = held.streams.get(stream)
        if found is None or found[0].numel() < self.floats or found[1].numel() < self.counters:
            found = held.grow(stream, self.floats, self.counters)
        return found
