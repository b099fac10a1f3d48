"""Host side that all prefill kernels share: scores' scalars, sections of heads, layouts that TMA can read.

Imports no cutlass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.core import Call, Target

from . import compile, driver

MOST = 2**30  # windows and sink counts above every length mean "all"
# Bytes of keys and values that one section of heads may fill, of an H200's 50 MB of L2. Causal, D 128, 1 x 16384:
# 716 TFLOP/s with 16 MB, 699 with 32 MB, 708 with all heads in one section.
_L2 = 16 << 20


def _strides(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> tuple[int, ...] | None:
    """Strides that TMA accepts for the same elements: multiples of ``step``, where the size is 1 too. None: no such."""
    found = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and (stride % step or stride == 0):
            return None
        found.append(step if size == 1 else stride)
    return (*found, 1)


def reader(signature: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Brings a tensor with this one's shape and strides into a layout that TMA reads; copies it if no view will do.

    E4M3 becomes bytes, which every torch can pass on.
    """
    size = signature.dtype.itemsize
    strides = _strides(tuple(signature.shape), tuple(signature.stride()), 8 if size > 1 else 16)
    same = strides == tuple(signature.stride())

    def read(t: torch.Tensor) -> torch.Tensor:
        t = t if size > 1 else t.view(torch.uint8)
        if strides is None or t.data_ptr() % 16:
            return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
        return t if same else t.as_strided(t.shape, strides)

    return read


def signed(q: torch.Tensor, sign: int) -> torch.Tensor:
    """q times 0 or -1, of E4M3 too, for which torch has no product: its sign is a bit of its own."""
    if sign == 0:
        return (q.float() * 0).to(q.dtype)  # nan stays nan
    return q.neg() if q.dtype.itemsize > 1 else (q.view(torch.uint8) ^ 128).view(q.dtype)


def query_reader(q: torch.Tensor, sign: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """``reader`` of a q that the kernel needs times ``sign``; the product lies in memory as it likes, not as q."""
    if sign > 0:
        return reader(q)
    read = reader(torch.empty(q.shape, dtype=q.dtype, device="meta"))
    return lambda t: read(signed(t, sign).contiguous())


@dataclass(frozen=True)
class Scores:
    """How scores become weights: scale, cap, window and sink tokens as in the op's arguments; ``dim`` is D."""

    dim: int
    scale: float | None
    softcap: float
    window: int
    sink_tokens: int

    @property
    def factor(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def sign(self) -> int:
        """What q is multiplied by for the kernel: it takes maxima of scores that are not scaled yet, and a masked score
        of -inf must not meet a scale of 0."""
        return 1 if self.softcap > 0 else (self.factor > 0) - (self.factor < 0)

    def features(self) -> dict[str, bool]:
        on = self.window >= 0
        return {"window": on, "sink_tokens": on and self.sink_tokens > 0, "softcap": self.softcap > 0}

    def scalars(self, section: int, sms: int) -> tuple[Any, ...]:
        """The kernel's Scalars."""
        capped = self.softcap > 0
        return (
            (self.softcap if capped else abs(self.factor) or 1.0) * math.log2(math.e),
            self.factor / self.softcap if capped else 0.0,
            min(self.window, MOST),
            min(self.sink_tokens, MOST),
            section,
            sms,
        )


def section(keys: int, row_bytes: int, group: int) -> int:
    """Query heads whose keys and values, ``keys`` rows of ``row_bytes`` per KV head of ``group`` heads, fit in L2."""
    return min(max(1, _L2 // max(1, keys * row_bytes)) * group, MOST)


def given(arguments: Any) -> tuple[bool, ...]:
    """Which of the scales of q, k and v a call has; of an op without such arguments none."""
    return tuple(getattr(arguments, f"{name}_scale", None) is not None for name in "qkv")


def fed(run: Callable[..., None], scalars: tuple[Any, ...], arg: Any, kv: tuple, sign: int) -> Callable[..., None]:
    """What runs a kernel on a call's tensors, brought into the layouts and the order of the kernel's Inputs.

    ``kv`` are the call's keys and values as the kernel has them, ``sign`` is that of ``signed``.
    """
    read_q, read_k, read_v = query_reader(arg.q, sign), *map(reader, kv)
    scaled = any(given(arg))

    def start(qkv: tuple, others: tuple, scales: tuple, outs: tuple) -> None:
        q, k, v = qkv
        ins = (read_q(q), read_k(k), read_v(v), *others, scales if scaled else None)
        run(ins, outs, scalars)

    return start


def nothing_attended(out: torch.Tensor, lse: torch.Tensor, row_sum: torch.Tensor) -> None:
    """The results of queries that have no keys."""
    out.zero_()
    lse.fill_(-torch.inf)
    row_sum.zero_()


def dense(
    call: Call,
    target: Target,
    signature: Callable[[Scores], dict[str, Any]],
    shared_by: Callable[[dict[str, Any]], int],
) -> Callable[..., None]:
    """flash_attention's launch; ``signature(scores)`` is what its kernel is compiled with.

    ``shared_by(signature)`` is how many pieces of the kernel's grid share a KV head.
    """
    B, T, S, Hq, D, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "D", "Dv"))
    a = call.arg
    window = -1 if a.window >= (S if a.causal else max(S, T)) else a.window
    scores = Scores(D, a.scale, a.softcap, window, a.sink_tokens)
    compiled = signature(scores)
    lengths = dict(kv_len=a.kv_len is not None, kv_start=a.kv_start is not None)
    run: Any = compile.launcher(call, target, target.arch, **lengths, **compiled)
    heads = section(S, (D + Dv) * call.dtype.itemsize, shared_by(compiled))
    start = _of_tokens(call, run, scores, heads, min(B, T, Hq), S)

    def launch(q, k, v, sink, kv_len, kv_start, q_scale, k_scale, v_scale, *rest):
        start((q, k, v), (sink, kv_start, kv_len), (q_scale, k_scale, v_scale), rest[-3:])

    return launch


def packed(call: Call, target: Target, signature: Callable[[Scores], dict[str, Any]]) -> Callable[..., None]:
    """flash_attention_varlen's launch; ``signature(scores)`` is what its kernel is compiled with."""
    Tq, Tk, Hq, D, sequences = (call.dim[axis] for axis in ("Tq", "Tk", "Hq", "D", "B"))
    a = call.arg
    longest = max(Tq, Tk)  # of one sequence, if nothing else is known
    scores = Scores(D, a.scale, a.softcap, -1 if a.window >= longest else a.window, a.sink_tokens)
    run: Any = compile.launcher(call, target, target.arch, **signature(scores))
    # One CTA per tile, which the hardware would balance, was 3 to 10 % slower on 64 lengths of 1 to 4096 (H200).
    start = _of_tokens(call, run, scores, 1, min(Tq, Hq), min(Tk, sequences))

    def launch(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, q_scale, k_scale, v_scale, *rest):
        start((q, k, v), (sink, cu_seqlens_q, cu_seqlens_k), (q_scale, k_scale, v_scale), rest[-3:])

    return launch


def _of_tokens(
    call: Call, run: Callable[..., None], scores: Scores, heads: int, queries: int, keys: int
) -> Callable[..., None]:
    """``fed`` for queries and keys of which there may be none, and for an op with out, LSE and row sum."""
    a, normalize = call.arg, call.arg.normalize
    start = fed(run, scores.scalars(heads, driver.sm_count(call.device)), a, (a.k, a.v), scores.sign)

    def launch(qkv: tuple, others: tuple, scales: tuple, results: tuple) -> None:
        out, lse, row_sum = results
        if queries == 0:
            return
        if keys == 0:
            return nothing_attended(out, lse, row_sum)
        start(qkv, others, scales, (out, lse, None if normalize else row_sum))

    return launch
