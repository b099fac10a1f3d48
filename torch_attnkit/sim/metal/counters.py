"""What a launch did, counted exactly; nothing here is a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .instrument import Site

MATRIX_FLOPS = 2 * 8 * 8 * 8


@dataclass(frozen=True)
class Line:
    """Memory instructions of one source line under the stated model.

    ``transactions`` are lines of 64 bytes (device) or rounds of the 32 banks (threadgroup), ``ideal`` the fewest that
    could have moved ``bytes``, ``worst`` the most that one instruction took.
    """

    line: int
    text: str
    space: str
    write: bool
    instructions: int
    bytes: int
    transactions: int
    ideal: int
    worst: int


@dataclass(frozen=True)
class Report:
    """Counts of one launch.

    ``buffers`` has (bytes read, bytes written) by device parameter, ``constant_read`` the bytes read from constant
    ones. ``flops`` are additions, subtractions, multiplications and divisions outside the matrix units (a fused
    multiply-add is two), ``matrix_flops`` those inside, ``special`` calls of sqrt, exp, log and the like. ``integer``
    are arithmetic, logic and shifts of integers up to 32 bits (those of 64 are addresses), ``conversions`` those from
    or to a floating format, ``choices`` comparisons and selections; all by component, of the program that clang has
    optimised for the CPU. ``barriers`` counts those of threadgroups, ``collectives`` the operations of simdgroups.
    ``memory_read`` and ``memory_written`` are bytes that pass a cache of ``Settings.cache`` bytes
    (``csrc/sim/metal/traffic.cpp`` states the model).
    """

    kernel: str
    buffers: dict[str, tuple[int, int]]
    constant_read: int
    flops: int
    matrix_flops: int
    special: int
    barriers: int
    simdgroup_barriers: int
    collectives: int
    divergent: int
    atomics: int
    threadgroup_read: int
    threadgroup_written: int
    memory_read: int
    memory_written: int
    lines: tuple[Line, ...] = field(repr=False)
    integer: int = 0
    conversions: int = 0
    choices: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes moved between the kernel and its buffers in device memory, both ways."""
        return sum(r + w for r, w in self.buffers.values())

    @staticmethod
    def of(
        kernel: str, c: dict[str, Any], device: dict[int, str], sites: Sequence[Site], text: Sequence[str]
    ) -> Report:
        merged: dict[tuple[int, int, bool], list[int]] = {}
        for site, space, write, instructions, _, size, transactions, ideal, worst in c["sites"]:
            line = sites[site][-1][0] if site >= 0 and sites[site] else 0
            row = merged.setdefault((line, space, write), [0, 0, 0, 0, 0])
            for i, n in enumerate((instructions, size, transactions, ideal)):
                row[i] += n
            row[4] = max(row[4], worst)
        spaces = {1: "device", 2: "constant", 3: "threadgroup"}
        lines = tuple(
            Line(line, text[line - 1].strip() if line else "", spaces[space], write, *row)
            for (line, space, write), row in sorted(merged.items())
        )
        buffers: dict[str, tuple[int, int]] = {}
        for slot, (read, written) in sorted(c["buffers"].items()):
            if slot in device:
                before = buffers.get(device[slot], (0, 0))
                buffers[device[slot]] = (before[0] + read, before[1] + written)
        constant = sum(read for slot, (read, _) in c["buffers"].items() if slot not in device)
        same = ("flops", "special", "integer", "conversions", "choices", "barriers", "simdgroup_barriers",
                "collectives", "divergent", "atomics",
                "threadgroup_read", "threadgroup_written", "memory_read", "memory_written")  # fmt: skip
        counts = {n: c[n] for n in same}
        return Report(
            kernel=kernel,
            buffers=buffers,
            constant_read=constant,
            matrix_flops=c["matrix"] * MATRIX_FLOPS,
            lines=lines,
            **counts,
        )
