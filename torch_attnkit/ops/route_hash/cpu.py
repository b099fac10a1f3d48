"""route_hash on the CPU: a row of the table, and the scores of its experts, for few rows in one pass (csrc/cpu), else
in few calls of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_attnkit import cpu
from torch_attnkit.core import Call, Target
from torch_attnkit.core.native import ready
from torch_attnkit.core.numerics import exact
from torch_attnkit.kernels.routing.cpu import in_one, sqrt_softplus, store

from .problem import operands
from .reference import reference


def build(call: Call, target: Target) -> Callable[..., None]:
    a, V, E = call.arg, call.dim["V"], call.dim["E"]
    usual = math.isfinite(a.route_scale) and call.dim["R"] > 0

    def launch(*arguments: Any) -> None:
        o = operands(*arguments)
        # A sum tells of NaN and +inf, which are refused; of -inf, too, and the definition takes that.
        if usual and math.isfinite(float(o.logits.sum())) and _within(o.token_ids, V):
            index = o.table.index_select(0, o.token_ids)  # (R, K)
            if _within(index, E):
                o.indices.copy_(index)
                store(sqrt_softplus(o.logits).gather(1, index.long()), a.renormalize, a.route_scale, o.weights)
                return
        weights, indices = reference(o.logits, o.token_ids, o.table, a.route_scale, a.renormalize)
        o.weights.copy_(weights)
        o.indices.copy_(indices)

    if not (usual and in_one(a.logits)):
        return launch
    kernel = cpu.kernels.HashRouter(
        [call.dim[axis] for axis in "REVK"], steps=[a.logits.stride(0), a.tid2eid.stride(0)],
        wide=[t.dtype == torch.int64 for t in (a.token_ids, a.tid2eid)], renormalize=a.renormalize,
        route_scale=a.route_scale,
    )  # fmt: skip
    many = exact(launch)

    @ready(kernel)
    def few(
        logits: torch.Tensor, token_ids: torch.Tensor, tid2eid: torch.Tensor, route_scale: float, renormalize: bool,
        weights: torch.Tensor, indices: torch.Tensor,
    ) -> None:  # fmt: skip
        if not kernel(
            logits.data_ptr(), token_ids.data_ptr(), tid2eid.data_ptr(), weights.data_ptr(), indices.data_ptr()
        ):
            many(logits, token_ids, tid2eid, route_scale, renormalize, weights, indices)

    return few


def _within(t: Any, end: int) -> bool:
    least, most = t.aminmax()
    return int(least) >= 0 and int(most) < end
