"""fp4_moe on the CPU, in float32: few tokens by a kernel of our own (csrc/cpu); for many, weights read back by one
look-up of two bytes, products by PyTorch's own kernels.

The definition takes a code apart by arithmetic, thirty times what the product with a few tokens costs. Here two bytes
pick all four of their numbers from a table, as 64 bits, and a scale its number from another, some at a time. Slots are
sorted by expert, and only products go expert by expert. What activations are rounded to, and the gated unit, are the
definition's. Nothing that was read back is kept: weights may be written to between two calls, also where no version
counts it, and whoever keeps FP4 weights wants their memory. Only the room that they are read back into is kept.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.formats import e2m1, fp8, nvfp4
from torch_attnkit.oracle import checks, fp4

from .problem import operands
from .reference import _swiglu

_ELEMENTS = 1 << 20  # of weights read back at a time: 4 MB; fewer are slower, in calls of PyTorch
_FEW = 4  # slots an expert, on average: each multiplies the weights in cache anew, and a product of many does not
_ROUNDING = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of the gated unit, as csrc/cpu counts them


@functools.cache
def _quads() -> torch.Tensor:
    """(65536,) the four float16 numbers of every two bytes as this machine reads them, low nibble first, as one int64.

    The numbers of E2M1 are exact in float16, half of what float32 would take of the cache.
    """
    words = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16)
    codes = words.view(torch.uint8).view(-1, 2)  # (65536, 2)
    elements = torch.stack((e2m1.decode(codes & 15), e2m1.decode(codes >> 4)), 2)  # (65536, 2, 2)
    return elements.half().view(-1, 4).view(torch.int64).flatten()


@functools.cache
def _scales(format: str) -> torch.Tensor:
    """(256,) the float32 number of every scale byte."""
    byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    return fp8.e4m3_decode(byte) if format == "nvfp4" else fp8.ue8m0_decode(byte)


class _Scratch(threading.local):
    """Where a thread reads weights back, 7 MB: what is asked for anew at this size often comes from the system page by
    page, at up to ten times the cost of what is written to it."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # what inference mode makes cannot be written to outside of it
            self.kept = self.made(_ELEMENTS)

    @staticmethod
    def made(elements: int) -> tuple[torch.Tensor, ...]:
        """Room for so many weights: words of two bytes, the quads that they pick, and their numbers."""
        sizes = (elements // 4, torch.int32), (elements // 4, torch.int64), (elements, torch.float32)
        return tuple(torch.empty(size, dtype=dtype, device="cpu") for size, dtype in sizes)

    def of(self, elements: int) -> tuple[torch.Tensor, ...]:
        """The same for ``elements`` weights, until the next call; of a row that is longer than all, its own."""
        if elements > _ELEMENTS:
            return self.made(elements)
        words, quads, floats = self.kept
        return words[: elements // 4], quads[: elements // 4], floats[:elements]


_scratch = _Scratch()


class Slots(NamedTuple):
    """The chosen experts, sorted: of every slot (n,), and those that have slots (e,), with how many each."""

    expert: torch.Tensor
    experts: torch.Tensor
    counts: list[int]


def build(call: Call, target: Target) -> Callable[..., None]:
    few = 0 < call.dim["Tq"] * call.dim["K"] <= _FEW * call.dim["E"]
    if few and cpu.kernels is not None and call.arg.activations == "none":
        return _of_few(call)
    return _of_many(call)


def _of_few(call: Call) -> Callable[..., None]:
    a, T, E, K, N = call.arg, *(call.dim[axis] for axis in ("Tq", "E", "K", "N"))
    M2, M, block, table = call.dim["M2"], call.dim["M2"] // 2, fp4.BLOCK[a.format], _scales(a.format)
    linear, wide = a.scale_layout == "linear", a.indices.dtype == torch.int64

    def matrices(codes: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> Any:
        steps = scale.stride()[:2] if linear else (rows * columns // block, columns // block)
        return cpu.kernels.Matrices(rows, columns, codes=codes.stride()[:2], scales=steps)

    kernel = cpu.kernels.Experts(
        matrices(a.w13, a.w13_scale, M2, N), matrices(a.w2, a.w2_scale, N, M),
        scale_of=table.data_ptr(), block=block, most_global=nvfp4.GLOBAL_SCALE_MAX,
        gptoss=a.swiglu == "gptoss", interleaved=a.interleaved, alpha=a.alpha, limit=a.limit,
        rounding=_ROUNDING[a.x.dtype],
    )  # fmt: skip

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        out = o.out if o.out.dtype == torch.float32 else torch.empty(T, N, dtype=torch.float32, device="cpu")
        x, weights, indices = o.x.float().contiguous(), o.weights.contiguous(), o.indices.contiguous()
        bias13, bias2 = (None if t is None else t.float().contiguous() for t in (o.bias13, o.bias2))
        s13, s2 = o.w13_scale, o.w2_scale
        if not linear:
            s13, s2 = fp4.load_scale(s13, "128x4", M2, N // block), fp4.load_scale(s2, "128x4", N, M // block)
        took = kernel(
            [cpu.address(t) for t in (o.w13, s13, o.w13_global, bias13)],
            [cpu.address(t) for t in (o.w2, s2, o.w2_global, bias2)],
            x.data_ptr(), weights.data_ptr(), indices.data_ptr(), wide, out.data_ptr(), T, K, E,
            torch.get_num_threads(),
        )  # fmt: skip
        if not took:
            _of_many(call)(*arguments)
        elif out is not o.out:
            o.out.copy_(out)

    return launch


def _of_many(call: Call) -> Callable[..., None]:
    a, E, N, K = call.arg, call.dim["E"], call.dim["N"], call.dim["K"]
    M2, M, block = call.dim["M2"], call.dim["M2"] // 2, fp4.BLOCK[call.arg.format]
    quads, table = _quads(), _scales(a.format)

    def read(codes: torch.Tensor, scale: torch.Tensor, one: torch.Tensor | None) -> torch.Tensor:
        """Codes (e, R, C/2) under scales (e, R, C/block) and a global scale (e,) or None: the numbers (e, R, C)."""
        count, rows, half = codes.shape
        words, found, elements = _scratch.of(count * rows * half * 2)
        words.copy_(codes.view(torch.uint16).view(-1))
        torch.index_select(quads, 0, words, out=found)
        elements.copy_(found.view(torch.float16))
        factors = table.index_select(0, scale.view(-1).int())
        if one is not None:
            factors = (factors.view(count, -1) / one[:, None]).view(-1)
        elements.view(-1, block).mul_(factors[:, None])
        return elements.view(count, rows, 2 * half)

    def products(
        x: torch.Tensor, slots: Slots, codes: torch.Tensor, scale: torch.Tensor, one: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """x (n, C), sorted by expert: (n, R)."""
        rows, columns = codes.shape[1], 2 * codes.shape[2]
        out = x.new_empty(x.shape[0], rows)
        experts_a_step = _ELEMENTS // max(rows * columns, 1)  # experts
        step = rows if experts_a_step else max(1, _ELEMENTS // columns)  # rows of one expert
        tokens, results = x.split(slots.counts), out.split(slots.counts)
        for first in range(0, len(tokens), max(experts_a_step, 1)):
            some = slice(first, first + max(experts_a_step, 1))
            experts = slots.experts[some]
            own = None if one is None else one.index_select(0, experts)
            for at in range(0, rows, step):
                part = slice(at, min(at + step, rows))
                # Not codes[experts, part], which copies byte by byte.
                elements = read(codes[:, part].index_select(0, experts), scale[:, part].index_select(0, experts), own)
                for weight, token, result in zip(elements.mT.unbind(), tokens[some], results[some], strict=True):
                    torch.mm(token, weight, out=result if step == rows else result[:, part])
        return out if bias is None else out.add_(bias.index_select(0, slots.expert))

    def sorted_slots(indices: torch.Tensor) -> tuple[torch.Tensor, Slots]:
        """Which slots have an expert, sorted by it (n,), and their experts."""
        chosen = indices.flatten().tolist()  # (Tq * K,): few numbers, for which each call of PyTorch costs more
        if chosen and not -1 <= min(chosen) <= max(chosen) < E:
            checks.in_range(call.op, "indices", indices, -1, E - 1)
        order = sorted((slot for slot, e in enumerate(chosen) if e >= 0), key=chosen.__getitem__)
        expert = [chosen[slot] for slot in order]
        counts = Counter(expert)  # in the order of its first occurrences
        at, of, experts = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (order, expert, list(counts)))
        return at, Slots(of, experts, list(counts.values()))

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        order, slots = sorted_slots(o.indices)
        fp4.check_experts(call.op, slots.experts, w13_global=o.w13_global, w2_global=o.w2_global)
        fp4.check_global(call.op, x_global=o.x_global, h_global=o.h_global)
        parts = torch.zeros(*o.indices.shape, N, dtype=torch.float32, device=o.x.device)  # (Tq, K, N)
        if len(order) > 0:
            s13 = fp4.load_scale(o.w13_scale, a.scale_layout, M2, N // block)  # (E, 2M, N/block)
            s2 = fp4.load_scale(o.w2_scale, a.scale_layout, N, M // block)  # (E, N, M/block)
            tokens = fp4.round_trip(o.x, a.activations, o.x_global, torch.float32)  # (Tq, N)
            tokens = tokens.index_select(0, order // K)
            both = products(tokens, slots, o.w13, s13, o.w13_global, o.bias13)  # (n, 2M)
            h = _swiglu(both, a.swiglu, a.alpha, a.limit, a.interleaved)  # (n, M)
            h = h if a.activations != "none" else h.to(o.x.dtype)
            h = fp4.round_trip(h, a.activations, o.h_global, torch.float32)
            y = products(h, slots, o.w2, s2, o.w2_global, o.bias2)  # (n, N)
            parts.view(-1, N).index_copy_(0, order, y.mul_(o.weights.flatten().index_select(0, order)[:, None]))
        # In the order of k, whatever the order of experts.
        out = parts[:, 0] if K else parts.sum(1)
        for k in range(1, K):
            out += parts[:, k]
        o.out.copy_(out)

    return launch
