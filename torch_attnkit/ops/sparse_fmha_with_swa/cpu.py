"""sparse_fmha_with_swa on the CPU: few keys in C++ (csrc/cpu), else a token's keys gathered once, and two products of
PyTorch's own.

The definition gathers with two indices, masks whatever the call sees, and sums by einsum. Here masks are made only
where a token sees less than its window and its list. The definition takes what is left: encoded rows, pages, partial
results, tokens without a key in their window, scores that are not finite, and what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.core.native import ready
from torch_attnkit.core.numerics import exact
from torch_attnkit.kernels.sparse.problem import Operands

from .problem import operands
from .reference import reference

_GATHERED = 1 << 22  # numbers of keys at a time

_FEW = 1 << 20  # numbers that one thread multiplies in 0.1 ms


def build(call: Call, target: Target) -> Callable[..., None]:
    Tq, D, R, S, C = (call.dim.get(axis, 0) for axis in ("Tq", "D", "R", "S", "C"))
    scale = D**-0.5 if call.arg.scale is None else call.arg.scale
    W = min(call.arg.window, S)
    listed = call.dim["K"] if call.arg.topk_indices is not None else C
    plain = call.arg.format == "none" and call.arg.normalize and min(Tq, W, R) > 0
    plain = plain and call.arg.swa_block_table is None and call.arg.compressed_block_table is None
    few = Tq * call.dim["Hq"] * (W + listed) * D <= _FEW
    step = max(1, _GATHERED // max(1, (W + listed) * D))

    def within(t: torch.Tensor | None, least: int, most: int) -> bool:
        if t is None:
            return True
        low, high = t.aminmax()
        return int(low) >= least and int(high) <= most

    def taken(o: Operands) -> bool:
        """Whether the call is one without errors, and with a key for every token."""
        if not within(o.end, 1, S) or not within(o.length, 0, C):
            return False
        if o.indices is not None and o.indices.numel():
            order = o.indices.sort(1).values  # (Tq, K)
            again = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)
            if bool(again.any()) or not within(o.indices, -1, C - 1):
                return False
        return within(o.request, 0, R - 1)

    def rows(cache: torch.Tensor, request: torch.Tensor, key: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """The rows (t, n, D) of ``key`` (t, n) of requests (t,) as float32; zeros where ``seen`` (t, n) is false."""
        size, (per_request, per_key, _) = cache.shape[1], cache.stride()
        key = key if seen is None else key.where(seen, 0)
        if per_request == size * per_key:  # as one list of rows
            at = (key + request[:, None] * size).view(-1)
            found: torch.Tensor = cache.flatten(0, 1).index_select(0, at).view(*key.shape, -1)
        else:
            found = cache[request[:, None], key]
        found = found.float()
        if seen is not None:  # by row: masked_fill takes seven times as long
            found.flatten(0, 1).index_fill_(0, (~seen).flatten().nonzero()[:, 0], 0.0)
        return found

    def attend(o: Operands, t: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``t``: out (t, Hq, D) and lse (t, Hq), in float32."""
        token = torch.arange(t.start, min(t.stop, Tq), device="cpu")
        request = token * R // Tq if o.request is None else o.request[t].long()  # (t,)
        behind = torch.arange(-W, 0, dtype=torch.int32, device="cpu")  # (W,)
        near = o.end[t, None] + behind  # (t, W) keys of the window, negative before 0
        outside = None if within(near[:, :1], 0, S) else near < 0
        kv = rows(o.near, request, near, None if outside is None else ~outside)  # (t, W, D)
        if o.far is not None and C:
            if o.indices is not None:
                far = o.indices[t]  # (t, K)
            else:
                far = torch.arange(C, dtype=torch.int32, device="cpu").expand(len(near), C)
            seen = None
            if o.length is not None or o.indices is not None:
                seen = far >= 0
                if o.length is not None:
                    seen &= far < o.length[t, None]
                seen = None if bool(seen.all()) else seen
            if seen is not None or outside is not None:
                near_hidden = torch.zeros_like(near, dtype=torch.bool) if outside is None else outside
                far_hidden = torch.zeros_like(far, dtype=torch.bool) if seen is None else ~seen
                outside = torch.cat((near_hidden, far_hidden), 1)  # (t, W + K)
            kv = torch.cat((kv, rows(o.far, request, far, seen)), 1)  # (t, W + K, D)
        s = torch.bmm(o.q[t].float() * scale, kv.mT)  # (t, Hq, W + K)
        if outside is not None:
            s.masked_fill_(outside[:, None], -torch.inf)
        lse = s.logsumexp(-1)  # (t, Hq)
        return torch.bmm(s.sub_(lse[..., None]).exp_(), kv), lse

    def launch(*arguments: Any) -> None:
        o, results = operands(*arguments), arguments[-3:]
        found = []
        if plain and taken(o):
            found = [(t, *attend(o, t)) for t in (slice(first, first + step) for first in range(0, Tq, step))]
        # A sum of numbers of which one is infinite or NaN is, too.
        if not found or not all(math.isfinite(float(lse.sum())) for _, _, lse in found):
            for result, from_reference in zip(results, reference(*arguments[:-3]), strict=True):
                result.copy_(from_reference)
            return
        for t, out, lse in found:
            if o.sink is not None:  # it joins the denominator only
                out.mul_((lse - o.sink).sigmoid_()[..., None])
            results[0][t] = out
            results[1][t] = lse

    caches = (call.arg.q, call.arg.swa_kv, call.arg.compressed_kv)
    if cpu.kernels is None or not (plain and few) or any(t.dtype != torch.float32 for t in caches if t is not None):
        return launch
    return _of_few(call, scale, W, exact(launch))


def _of_few(call: Call, scale: float, window: int, many: Callable[..., None]) -> Callable[..., None]:
    """A launch in C++, and by ``many`` where that does not take the call."""
    a, far, listed = call.arg, call.arg.compressed_kv, call.arg.topk_indices
    sizes = [call.dim.get(axis, 0) for axis in ("Tq", "Hq", "D", "R", "S", "C")]
    kernel = cpu.kernels.Sparse(
        [*sizes, 0 if listed is None else listed.shape[1]], window=window, scale=scale, q=a.q.stride()[:2],
        near=a.swa_kv.stride()[:2], far=(0, 0) if far is None else far.stride()[:2],
        chosen=0 if listed is None else listed.stride(0),
    )  # fmt: skip

    @ready(kernel)
    def launch(*arguments: Any) -> None:
        o, (out, lse, row_sum) = operands(*arguments), arguments[-3:]
        if not kernel(
            o.q.data_ptr(), o.near.data_ptr(), o.end.data_ptr(), cpu.address(o.far), cpu.address(o.indices),
            cpu.address(o.length), cpu.address(o.request), cpu.address(o.sink), 0, 0, 0, out.data_ptr(),
            lse.data_ptr(), row_sum.data_ptr(),
        ):  # fmt: skip
            many(*arguments)

    return launch
