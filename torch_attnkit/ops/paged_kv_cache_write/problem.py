"""A call of paged_kv_cache_write as a problem of the kernels on pages."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.cache.problem import PagedOperands, PagedProblem, Side


def problem(call: Call) -> PagedProblem:
    a, dim = call.arg, call.dim
    sides = tuple(
        Side(dim[width], tuple(new.stride()[:2]), tuple(cache.stride()[:3]), scale is not None)
        for width, new, cache, scale in (("D", a.key, a.k_cache, a.k_scale), ("Dv", a.value, a.v_cache, a.v_scale))
    )
    return PagedProblem(
        sides, call.device, a.key.dtype, a.k_cache.dtype, a.slot.dtype, dim["R"], dim["Hkv"], dim["Np"], dim["Ps"]
    )


def operands(key, value, k_cache, v_cache, slot, k_scale, v_scale) -> PagedOperands:
    return PagedOperands(key, value, k_cache, v_cache, slot, k_scale, v_scale)
