"""A call of paged_kv_cache_write as a problem of the kernels on pages."""

from __future__ import annotations

from torch_attnkit.core.op import Call
from torch_attnkit.kernels.cache.pages import Operands, Problem, Side


def problem(call: Call) -> Problem:
    a, dim = call.arg, call.dim
    sides = tuple(
        Side(dim[width], tuple(new.stride()[:2]), tuple(cache.stride()[:3]), scale is not None)
        for width, new, cache, scale in (("D", a.key, a.k_cache, a.k_scale), ("Dv", a.value, a.v_cache, a.v_scale))
    )
    return Problem(
        sides, call.device, a.key.dtype, a.k_cache.dtype, a.slot.dtype, dim["R"], dim["Hkv"], dim["Np"], dim["Ps"]
    )


def operands(key, value, k_cache, v_cache, slot, k_scale, v_scale) -> Operands:
    return Operands(key, value, k_cache, v_cache, slot, k_scale, v_scale)
