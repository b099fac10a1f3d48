"""What launches did, exactly counted, and how fast a GPU could at best do that: modelled, never measured.

Every resource of a chip takes a time for what a launch asks of it, and the launch takes at least the longest of them.
Latency, dependencies, occupancy and the cost of a launch are left out, so that real times are longer. Bytes of global
memory are those that instructions and copies asked for: how many of them a cache spares is not known, so the time for
memory is that of a kernel whose every request goes there.

Figures, by multiprocessor and cycle where not said otherwise:
- B200: 148 multiprocessors, 8 TB/s, without sparsity 2250 TFLOPS in half precision, 1100 in TF32, 4500 in FP8 and INT8,
  9000 in FP4 (NVIDIA, HGX B200 data sheet). H200 SXM: 132, 4.8 TB/s, 989 / 495 / 1979 (NVIDIA, H200 data sheet, which
  gives the figures with sparsity).
- A100 80 GB SXM: 108, 2.04 TB/s, 312 / 156, 624 in INT8 (NVIDIA, A100 data sheet). RTX 4090: 128, 1.01 TB/s, 165.2 /
  82.6 / 330.3 with float32 sums (NVIDIA, Ada whitepaper). RTX 5090: 170, 1.79 TB/s, 209.5 in half precision (RTX
  Blackwell whitepaper); with scales of blocks 737 in FP8 and 1474 in FP4, as others have measured (mmapeak). Without
  such scales FP8 is half as fast there, which is not modelled.
- clocks: the boost clocks of A100, RTX 4090 and RTX 5090; else those at which 4096 (H200) or 8192 (B200) half-precision
  operations are the published peak: 1.83 and 1.86 GHz.
- warp instructions: 4, one by scheduler; special functions: 16 lanes; shared memory: 128 bytes (CUDA programming guide,
  "Arithmetic Instructions" and "Shared Memory", compute capability 9.0; the FlashAttention-4 authors found the special
  functions and the shared memory of the B200 as wide as the H100's). ``mma.sync`` on a B200 is taken at a quarter of
  the tensor cores' rate, as if it were an A100's; nothing has been published about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from .settings import Launch

_ISSUE, _SPECIAL, _SHARED_BYTES, _BANKS_BYTES = 4, 16, 128, 128


@dataclass(frozen=True)
class Chip:
    """``tensor``: TFLOPS without sparsity by bits of an operand's element (19 stands for TF32)."""

    name: str
    processors: int
    ghz: float
    memory: float  # TB/s
    tensor: Mapping[int, float]
    mma_sync: float = 1.0  # rate of mma.sync, as a part of `tensor`

    def cycles(self, ctas: int) -> float:
        """Cycles of all multiprocessors that ``ctas`` can occupy, in a microsecond."""
        return min(self.processors, max(1, ctas)) * self.ghz * 1e3


_B200 = Chip("B200", 148, 1.86, 8.0, {16: 2250.0, 19: 1100.0, 8: 4500.0, 4: 9000.0}, 0.25)
_5090 = Chip("RTX 5090", 170, 2.41, 1.79, {16: 209.5, 19: 104.8, 8: 737.0, 4: 1474.0})
CHIPS = {
    "sm_80": Chip("A100", 108, 1.41, 2.04, {16: 312.0, 19: 156.0, 8: 624.0}),
    "sm_89": Chip("RTX 4090", 128, 2.52, 1.01, {16: 165.2, 19: 82.6, 8: 330.3}),
    "sm_90a": Chip("H200", 132, 1.83, 4.8, {16: 989.0, 19: 495.0, 8: 1979.0}),
    "sm_100a": _B200,
    "sm_100f": _B200,  # for a family of GPUs, of which this one is simulated
    "sm_120a": _5090,
    "sm_120f": _5090,
}
_BITS = {
    **dict.fromkeys(("f16", "bf16"), 16),
    **dict.fromkeys(("tf32",), 19),
    **dict.fromkeys(("f8f6f4", "mxf8f6f4", "i8", "e4m3", "e5m2", "s8", "u8"), 8),
    **dict.fromkeys(("mxf4", "mxf4nvf4"), 4),
}


def _product(sizes: Iterable[int]) -> int:
    n = 1
    for size in sizes:
        n *= size
    return n


def _tensor_time(flops: Mapping[str, int], chip: Chip, share: float) -> float | None:
    """Microseconds of the tensor cores of ``share`` of the chip; None when the chip has no rate for a kind."""
    total = 0.0
    for kind, n in flops.items():
        rate = chip.tensor.get(_BITS.get(kind.split()[-1], 0))
        if rate is None:
            return None
        total += n / (rate * share * 1e6 * (chip.mma_sync if kind.startswith("mma.sync") else 1.0))
    return total


def times(launch: Launch, chip: Chip) -> dict[str, float]:
    """Microseconds that each resource of the chip needs for one launch."""
    c, ctas = launch.counters, _product(launch.grid)
    cycles = chip.cycles(ctas)
    memory = c["global_read"] + c["global_written"] + c["tma_read"] + c["tma_written"] + c["cp_async"]
    copied = c["tma_read"] + c["tma_written"] + c["cp_async"] + c.get("tensor_shared_read", 0)
    shared = c["shared_wavefronts"] + copied / _SHARED_BYTES
    found = {
        "memory": memory / (chip.memory * 1e6),
        "tensor cores": _tensor_time(c["flops"], chip, min(1.0, ctas / chip.processors)),
        "issue slots": c["instructions"] / (_ISSUE * cycles),
        "special functions": c["by_class"].get("special_function", 0) * 32 / (_SPECIAL * cycles),
        "shared memory": shared / cycles,
    }
    return {what: t for what, t in found.items() if t is not None}


def bound(launch: Launch, chip: Chip) -> tuple[float, str]:
    """Microseconds that a launch takes at least, and the resource that says so."""
    return max((t, what) for what, t in times(launch, chip).items())


def roles(launch: Launch) -> dict[str, float]:
    """Part of the issued instructions by warps of the CTA: neighbours that issued alike (within 10 %) are one role."""
    counts: Sequence[int] = launch.counters["by_warp"]
    total, found, first = sum(counts) or 1, {}, 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or abs(counts[i] - counts[first]) > 0.1 * max(counts[i], counts[first]):
            name = f"warp {first}" if i == first + 1 else f"warps {first}-{i - 1}"
            found[name] = sum(counts[first:i]) / total
            first = i
    return found


def _size(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 10_000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1e3
    return f"{n:.1f} GB"


def _both(c: Mapping[str, Any], what: str) -> str:
    return f"{_size(c[what + '_read'])} read, {_size(c[what + '_written'])} written"


def _joined(parts: Iterable[tuple[str, float]], form: str) -> str:
    """The parts that are not zero, largest first."""
    return ", ".join(form.format(name=name, n=n) for name, n in sorted(parts, key=lambda part: -part[1]) if n)


def _estimate(launch: Launch, chip: Chip) -> str:
    least, what = bound(launch, chip)
    parts = _joined(times(launch, chip).items(), "{name} {n:.3g}")
    return f"modelled, not measured: at least {least:.3g} us on a {chip.name} ({what}); us by resource: {parts}"


def lines(launch: Launch) -> list[str]:
    """The counters of one launch and its estimates, to be printed."""
    c = launch.counters
    classes = ((name.replace("_", " "), n) for name, n in c["by_class"].items())
    conflicts = c["shared_wavefronts"] - c["shared_least_wavefronts"]
    copies = f"{c['tma_transactions']:,} transactions"
    if c["cp_async"]:
        copies += f", {_size(c['cp_async'])} by cp.async"
    wavefronts = f"{c['shared_wavefronts']:,} wavefronts, {conflicts:,} of them bank conflicts"
    out = [
        f"{launch.kernel} on {launch.target}, grid {launch.grid}, block {launch.block}",
        f"  warp instructions  {c['instructions']:,}: {_joined(classes, '{n:,} {name}')}",
        f"  issue slots        {', '.join(f'{name} {part:.0%}' for name, part in roles(launch).items())}",
        f"  global memory      {_both(c, 'global')} in {c['global_sectors']:,} sectors of 32 B",
        f"  copies (TMA, bulk) {_both(c, 'tma')} in {copies}",
        f"  shared memory      {_both(c, 'shared')}, {wavefronts}",
    ]
    if c["tmem_read"] or c["tmem_written"]:
        out.append(f"  tensor memory      {_both(c, 'tmem')}")
    if c["flops"]:
        mega = ((kind, n / 1e6) for kind, n in c["flops"].items())
        out.append(f"  tensor cores       {_joined(mega, '{n:,.1f} MFLOP {name}')}")
    if launch.target in CHIPS:
        out.append(f"  {_estimate(launch, CHIPS[launch.target])}")
    out += [f"  {note}" for note in launch.notes if note.startswith("note: waived:")]
    return out


def print_roofline(console: Console, title: str, launches: Sequence[Launch]) -> None:
    """A title and one block of lines for each launch."""
    console.print(title, style="bold", highlight=False)
    for launch in launches:
        console.print("\n".join(lines(launch)), highlight=False, markup=False, soft_wrap=True)
