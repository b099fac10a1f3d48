"""sdpa_multi on Blackwell: out = softmax(scale * q K') V for a block of queries, K and V read once per KV head.

The device code is flash_attention's, ``cuda/sm100/prefill.py`` and for D 512 ``cuda/sm100/prefill_wide.py``: the query
heads of a KV head and the queries of a block are the rows of its tiles, and a sequence's queries end where its keys do.
Where tiles alone would leave multiprocessors idle, ``cuda/sm100/multi_plan.py`` cuts the keys of each into shares,
which a second launch merges, merge_partials'. They have run in the PTX simulator only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from torch_attnkit.core import Call, Target
from torch_attnkit.core.spec import short
from torch_attnkit.cuda import compile, driver, prefill_launch
from torch_attnkit.cuda.sm100 import multi_plan, prefill_plan
from torch_attnkit.cuda.splits import Workspace
from torch_attnkit.ops.merge_partials import cuda as merge_partials


def shares(call: Call, signature: dict[str, Any], sms: int) -> int:
    """Into how many the keys of every tile are cut. As the lengths are on the device, a full cache is assumed."""
    B, T, S, Hq, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "Dv"))
    a, group, tiles, tile_n = call.arg, signature["group"], signature["tiles"], signature["tile_n"]
    # A window reaches to both sides unless causal; where it does not begin with a block it costs one more.
    seen = S if a.window < 0 else min(S, (1 if a.causal else 2) * a.window + T + a.sink_tokens + tile_n)
    work = multi_plan.Work(
        -(-T * group // (128 * tiles)), tiles, B * Hq // group, -(-seen // tile_n), tile_n,
        signature["dim"], Dv, B * T * Hq, call.dtype.itemsize,
    )  # fmt: skip
    return multi_plan.shares(work, sms // prefill_plan.multiprocessors(signature))


def build(call: Call, target: Target) -> Callable[..., None]:
    B, T, S, Hq, Hkv, D, Dv = (call.dim[axis] for axis in ("B", "T", "S", "Hq", "Hkv", "D", "Dv"))
    a = call.arg
    if min(B, T, Hq) == 0:
        return lambda *args: None
    scores = prefill_launch.Scores(D, a.scale, a.softcap, a.window, a.sink_tokens)
    signature = prefill_plan.signature(call, T, scores) | dict(kv_start=a.kv_start is not None)
    sms = driver.sm_count(call.device)
    parts = shares(call, signature, sms)
    run: Any = _in_shares(call, target, signature, parts, sms)
    if run is None:
        run = compile.launcher(call, target, "sm100", **signature)
    section = prefill_launch.section(S, (D + Dv) * call.dtype.itemsize, max(1, Hq // Hkv // signature["group"]))
    by_token = lambda *caches: tuple(t.transpose(1, 2) for t in caches)  # (B, S, Hkv, D)
    kv = by_token(a.k_cache, a.v_cache)
    start = prefill_launch.fed(run, scores.scalars(section, sms), a, kv, scores.sign)

    def launch(q, k, v, kv_len, sink, kv_start, q_scale, k_scale, v_scale, *rest):
        out, lse = rest[-2:]
        if S == 0:
            out.zero_()
            lse.fill_(-torch.inf)
            return
        start((q, *by_token(k, v)), (sink, kv_start, kv_len), (q_scale, k_scale, v_scale), (out, lse, None))

    return launch


def _in_shares(
    call: Call, target: Target, signature: dict[str, Any], parts: int, sms: int
) -> Callable[..., None] | None:
    """What runs the kernel on ``parts`` shares of the keys and merges them, with the kernel's arguments; None for one.

    A pair of CTAs would halve their number, and sinks are for the merge.
    """
    if parts == 1:
        return None
    B, T, Hq, Dv = (call.dim[axis] for axis in ("B", "T", "Hq", "Dv"))
    alone = signature | dict(split=True, sink=False, pair=False)
    attend = compile.launcher(call, target, "sm100", **alone)
    width = 8  # elements of a vector: 16 bytes of out; every Dv of the table is a multiple
    config = merge_partials.configure(parts, B * T * Hq, Dv, width, sms)
    out_dtype = call.dtype if call.dtype.itemsize > 1 else torch.bfloat16
    merge = compile.launcher(
        call, target, "sm100", trace="trace_merge", dtypes=("f32", short(out_dtype)), sink=signature["sink"],
        row_sum=False, config=astuple(config),
    )  # fmt: skip
    rows = parts * B * T * Hq
    space = Workspace(call.device, rows * (Dv + 1), 0)

    def run(ins: tuple[Any, ...], outs: tuple[Any, ...], scalars: tuple[Any, ...]) -> None:
        floats, _ = space.get()
        out, lse = floats[: rows * Dv], floats[rows * Dv : rows * (Dv + 1)]
        q, k, v, _, *lengths = ins
        places = (out.view(parts * B, T, Hq, Dv), lse.view(parts * B, T, Hq), None)
        attend((q, k, v, None, *lengths), places, scalars)
        merged = (outs[0].view(B * T, Hq, Dv), outs[1].view(B * T, Hq))
        merge(out.view(parts, B * T, Hq, Dv), lse.view(parts, B * T, Hq), ins[3], None, *merged)

    return run
