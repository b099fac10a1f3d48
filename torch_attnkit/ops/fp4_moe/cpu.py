"""fp4_moe on the CPU: weights read back by one look-up a byte, products by PyTorch's own kernels, all in float32.

The definition takes a code apart by arithmetic, thirty times what the product with a few tokens costs. Here a byte
picks both of its numbers from a table, as 64 bits at a time, and a scale its number from another, some at a time. Slots
are sorted by expert, and only products go expert by expert. What activations are rounded to, and the gated unit, are
the definition's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.formats import e2m1, fp8
from torch_attnkit.oracle import checks, fp4

from .problem import operands
from .reference import _swiglu

_NUMBERS = 1 << 20  # of weights read back at a time: 4 MB; fewer are slower, in calls of PyTorch


def _pairs() -> torch.Tensor:
    """(256,) the two float32 numbers of every byte, low nibble first, as one int64."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    pairs = torch.stack((e2m1.decode(byte & 15), e2m1.decode(byte >> 4)), 1)  # (256, 2)
    return pairs.view(torch.int64).flatten()


def _scales(format: str) -> torch.Tensor:
    """(256,) the float32 number of every scale byte."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    return fp8.e4m3_decode(byte) if format == "nvfp4" else fp8.ue8m0_decode(byte)


def build(call: Call, target: Target) -> Callable[..., None]:
    a, E, N, K = call.arg, call.dim["E"], call.dim["N"], call.dim["K"]
    M2, M, block = call.dim["M2"], call.dim["M2"] // 2, fp4.BLOCK[call.arg.format]
    pairs, table = _pairs(), _scales(a.format)

    def read(codes: torch.Tensor, scale: torch.Tensor, one: torch.Tensor | None) -> torch.Tensor:
        """Codes (e, R, C/2) under scales (e, R, C/block) and a global scale (e,) or None: the numbers (e, R, C)."""
        count, rows, half = codes.shape
        numbers = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32)
        factors = table.index_select(0, scale.reshape(-1).int())
        if one is not None:
            factors = (factors.view(count, -1) / one[:, None]).flatten()
        return numbers.view(-1, block).mul_(factors[:, None]).view(count, rows, 2 * half)

    def products(
        x: torch.Tensor, bounds: list[tuple[int, int, int]], codes: torch.Tensor, scale: torch.Tensor,
        one: torch.Tensor | None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """x (n, C), rows start to stop of which are expert e's for each (e, start, stop): (n, R)."""
        rows, columns = codes.shape[1], 2 * codes.shape[2]
        out = x.new_empty(x.shape[0], rows)
        at_once = _NUMBERS // max(rows * columns, 1)  # experts
        step = rows if at_once else max(1, _NUMBERS // columns)  # rows of one expert
        for first in range(0, len(bounds), max(at_once, 1)):
            some = bounds[first : first + max(at_once, 1)]
            experts = torch.tensor([e for e, *_ in some], device=codes.device)
            own = None if one is None else one[experts]
            for at in range(0, rows, step):
                part = slice(at, min(at + step, rows))
                # Not codes[experts, part], which copies byte by byte.
                numbers = read(codes[:, part].index_select(0, experts), scale[:, part].index_select(0, experts), own)
                for weight, (_, start, stop) in zip(numbers, some, strict=True):
                    torch.mm(x[start:stop], weight.T, out=out[start:stop, part])
        if bias is not None:
            out += torch.cat([bias[e].float().expand(stop - start, -1) for e, start, stop in bounds])
        return out

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        checks.in_range(call.op, "indices", o.indices, -1, E - 1)
        fp4.check_global(
            call.op, w13_global=o.w13_global, w2_global=o.w2_global, x_global=o.x_global, h_global=o.h_global
        )
        chosen = o.indices.flatten().long()  # (Tq * K,)
        order = chosen.argsort(stable=True)
        order = order[int((chosen < 0).sum()) :]  # (n,) slots with an expert, by expert
        parts = torch.zeros(*o.indices.shape, N, dtype=torch.float32, device=o.x.device)  # (Tq, K, N)
        if len(order) > 0:
            ends = chosen[order].bincount(minlength=E).cumsum(0).tolist()
            bounds = [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a < b]
            s13 = fp4.load_scale(o.w13_scale, a.scale_layout, M2, N // block)  # (E, 2M, N/block)
            s2 = fp4.load_scale(o.w2_scale, a.scale_layout, N, M // block)  # (E, N, M/block)
            tokens = fp4.round_trip(o.x, a.activations, o.x_global, torch.float32)  # (Tq, N)
            both = products(tokens[order // K], bounds, o.w13, s13, o.w13_global, o.bias13)  # (n, 2M)
            h = _swiglu(both, a.swiglu, a.alpha, a.limit, a.interleaved)  # (n, M)
            h = h if a.activations != "none" else h.to(o.x.dtype)
            h = fp4.round_trip(h, a.activations, o.h_global, torch.float32)
            y = products(h, bounds, o.w2, s2, o.w2_global, o.bias2)  # (n, N)
            parts.view(-1, N)[order] = y.mul_(o.weights.flatten()[order, None])
        # In the order of k, whatever the order of experts.
        out = torch.zeros(o.x.shape, dtype=torch.float32, device=o.x.device)
        for k in range(K):
            out += parts[:, k]
        o.out.copy_(out)

    return launch
