"""Whether a GPU can be trusted at all: one small kernel whose every result is known.

Virtual machines offer Apple GPUs that run a kernel without an error and leave wrong numbers. There, every parity case
fails for a reason that lies in no kernel of ours; so this one runs first, on hardware and in the simulator alike.
"""

from __future__ import annotations

import torch

from torch_attnkit.core.target import Target

from . import launch, library

_GROUPS, _THREADS = 3, 128
_LARGE = 9_007_199_254_740_993
_SCALE = 0.0123  # x runs over the integers from -192 to 191
# exp(x) of a float rounds x * log2(e) in float: 2.4 may cost 2.4 * 2^-24 of relative error, and the function 4 units.
_EXP_ERROR = 1e-6
ANSWERS = (
    "threadgroup memory behind a barrier", "simd_sum", "simd_max", "simd_shuffle_xor", "8x8 product, even columns",
    "8x8 product, odd columns", "rounding to half", "rounding to bfloat", "64-bit arguments", "exp",
    "8x8 product of bfloat, even columns", "8x8 product of bfloat, odd columns", "product of bfloat numbers in float",
)  # fmt: skip


def inputs() -> torch.Tensor:
    n = _GROUPS * _THREADS
    return torch.arange(n, dtype=torch.float32) - n // 2


def expected(x: torch.Tensor) -> torch.Tensor:
    """(answers, n) float64, by PyTorch on the CPU; all but exp are exact in float."""
    groups, simds = x.double().view(_GROUPS, _THREADS), x.double().view(-1, 32)
    lane = torch.arange(32)
    row, col = (lane // 4 & 4) + lane // 2 % 4, (lane // 4 & 2) * 2 + lane % 2 * 2
    index = torch.arange(8.0, dtype=torch.float64)
    a, b = index[:, None] + 2 * index, 3 * index[:, None] - index  # (8, 8)
    by = torch.arange(1, _GROUPS + 1).repeat_interleave(_THREADS // 32)[:, None]
    scaled = x * torch.tensor(_SCALE, dtype=torch.float32)
    large = torch.tensor(_LARGE) // torch.arange(1, len(x) + 1) % 1000
    product, narrow = (a @ b)[row, col], scaled.bfloat16().float()
    odd_product = (a @ b)[row, col + 1]
    rows = [
        groups.flip(1), simds.sum(1, keepdim=True).expand(-1, 32), simds.amax(1, keepdim=True).expand(-1, 32),
        simds[:, lane ^ 5], by * product + simds, by * odd_product - simds,
        scaled.half(), scaled.bfloat16(), large, scaled.double().exp(),
        product + simds, odd_product - simds, narrow.square() + x,
    ]  # fmt: skip
    return torch.stack([r.reshape(-1).double() for r in rows])


def wrong(target: Target, device: str) -> list[str]:
    """What ``device`` gets wrong, one line each; nothing if it can be trusted. It never raises for a broken device."""
    x = inputs()
    out = torch.full((len(ANSWERS), len(x)), float("nan"), dtype=torch.float32).to(device)
    try:
        run = launch.launcher(library.load("known_answer", target), "known_answer", (_GROUPS, 1, 1), _THREADS)
        run((x.to(device), out, [len(x), _LARGE], _SCALE))
        got = out.cpu().double()
    except (RuntimeError, SyntaxError, ValueError) as error:
        return [f"the kernel did not run: {type(error).__name__}: {error}"]
    want = expected(x)
    found = []
    for name, x, right in zip(ANSWERS, got, want, strict=True):
        near = _EXP_ERROR * right.abs() if name == "exp" else torch.zeros_like(right)
        off = ~((x - right).abs() <= near)
        if off.any():
            i = int(off.nonzero()[0])
            found.append(f"{name}: {int(off.sum())} of {len(x)} are wrong, thread {i} has {x[i]:g} for {right[i]:g}")
    return found
