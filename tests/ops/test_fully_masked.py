"""What an op's contract says that nobody looks at may be anything: NaN in its place changes no bit of a result.

The ops and their rows come from the table. ``MASKED`` says of each op what is unseen in a call's arguments, and ``ALL``
names the ops that look at everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.targets import needs, on
from torch_attnkit import cpu
from torch_attnkit.core import dispatch
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.formats.scale_layout import from_128x4, to_128x4
from torch_attnkit.ops.flash_attention_paged.cases import seen_keys as seen_of_blocks
from torch_attnkit.oracle.attention import visible
from torch_attnkit.parity.case import Case, arguments, cases

pytestmark = [pytest.mark.simulator, pytest.mark.seconds(600)]
Args = dict[str, Any]
Masks = dict[str, torch.Tensor]  # by argument: which of its elements, or of its rows, nobody sees


def _scores(a: Args) -> dict[str, Any]:
    return dict(window=a["window"], sink_tokens=a["sink_tokens"])


def _by_sequence(a: Args, seen: torch.Tensor) -> Masks:
    """Scales of sequences that see nothing, by ``seen`` (B, keys)."""
    return {n: ~seen.any(1)[:, None].expand_as(a[n]) for n in ("q_scale", "k_scale", "v_scale") if a[n] is not None}


def _keep(a: Args, pos: torch.Tensor, keys: int, causal: bool) -> torch.Tensor:
    """(B, T, keys)."""
    start = 0 if a["kv_start"] is None else a["kv_start"][:, None]
    end = keys if a["kv_len"] is None else a["kv_len"][:, None]
    return visible(pos, keys, start, end, causal=causal, **_scores(a)) & (pos >= 0)[..., None]


def _caches(a: Args) -> Masks:
    """Of sdpa_decode and sdpa_multi: caches (B, Hkv, S, D), queries at the end of each."""
    q, k = a["q"], a["k_cache"]
    T = 1 if q.dim() == 3 else q.shape[1]
    keep = _keep(a, a["kv_len"][:, None] - T + torch.arange(T), k.shape[2], a.get("causal", True))
    hidden = ~keep.any(1)[:, None].expand(k.shape[:3])  # (B, Hkv, S)
    blind = ~keep.any(2).view(*q.shape[:-2], 1).expand(q.shape[:-1])  # queries without keys
    return dict(k_cache=hidden, v_cache=hidden, q=blind) | _by_sequence(a, keep.any(1))


def _dense(a: Args) -> Masks:
    q, k = a["q"], a["k"]
    (B, T), S = q.shape[:2], k.shape[1]
    pos = torch.arange(S - T, S).expand(B, T)
    start = 0 if a["kv_start"] is None else a["kv_start"][:, None]
    end = S if a["kv_len"] is None else a["kv_len"][:, None]
    keep = visible(pos, S, start, end, causal=a["causal"], **_scores(a))
    hidden = ~keep.any(1)[..., None].expand(k.shape[:3])
    blind = ~keep.any(2)[..., None].expand(q.shape[:3])
    return dict(k=hidden, v=hidden, q=blind) | _by_sequence(a, keep.any(1))


def _varlen(a: Args) -> Masks:
    cq, ck = a["cu_seqlens_q"].tolist(), a["cu_seqlens_k"].tolist()
    key, query = torch.ones(a["k"].shape[:2], dtype=torch.bool), torch.ones(a["q"].shape[:2], dtype=torch.bool)
    some = torch.zeros(len(cq) - 1, 1, dtype=torch.bool)
    for b, (q0, q1, k0, k1) in enumerate(zip(cq, cq[1:], ck, ck[1:], strict=False)):
        T, S = q1 - q0, k1 - k0
        keep = visible(torch.arange(S - T, S)[None], S, 0, S, causal=a["causal"], **_scores(a))[0]  # (T, S)
        key[k0:k1], query[q0:q1], some[b] = ~keep.any(0)[:, None], ~keep.any(1)[:, None], bool(keep.any())
    return dict(k=key, v=key, q=query) | _by_sequence(a, some)


def _pages(a: Args, seen: torch.Tensor) -> Masks:
    """By ``seen`` (B, Mp * Ps): rows of pages, and entries of the table."""
    (Np, Ps, Hkv, _), table = a["k_cache"].shape, a["block_table"]
    b, key = seen.nonzero(as_tuple=True)
    rows = torch.ones(Np, Ps, dtype=torch.bool)
    rows[table[b, key // Ps].long(), key % Ps] = False
    rows = rows[..., None].expand(Np, Ps, Hkv)
    used = seen.unflatten(1, (table.shape[1], Ps)).any(2)
    return dict(k_cache=rows, v_cache=rows, block_table=~used) | _by_sequence(a, seen)


def _decode_paged(a: Args) -> Masks:
    keep = _keep(a, a["kv_len"][:, None] - 1, a["block_table"].shape[1] * a["k_cache"].shape[1], True)[:, 0]
    return _pages(a, keep) | dict(q=~keep.any(1)[:, None].expand(a["q"].shape[:2]))


def _flash_paged(a: Args) -> Masks:
    keys = a["block_table"].shape[1] * a["k_cache"].shape[1]
    return _pages(
        a, seen_of_blocks(a["cu_seqlens_q"].diff(), a["kv_len"], keys, a["causal"], a["window"], a["sink_tokens"])
    )


def _sparse(a: Args) -> Masks:
    Tq = a["q"].shape[0]
    found: Masks = {}
    swa, table = a["swa_kv"], a["swa_block_table"]
    R, S = swa.shape[:2] if table is None else (table.shape[0], table.shape[1] * swa.shape[1])
    owner = torch.arange(Tq) * R // max(Tq, 1) if a["request_ids"] is None else a["request_ids"].long()
    key = torch.arange(S)
    near = (key < a["swa_end"][:, None]) & (key >= a["swa_end"][:, None] - min(a["window"], S))  # (Tq, S)
    looked = [("swa", near)]
    if a["compressed_kv"] is not None:
        other, pages = a["compressed_kv"], a["compressed_block_table"]
        C = other.shape[1] if pages is None else pages.shape[1] * other.shape[1]
        far = torch.ones(Tq, C, dtype=torch.bool)
        if a["topk_indices"] is not None:
            listed = torch.zeros(Tq, C + 1, dtype=torch.bool)
            far = listed.scatter(1, a["topk_indices"].long() % (C + 1), True)[:, :C]
        if a["compressed_len"] is not None:
            far = far & (torch.arange(C) < a["compressed_len"][:, None])
        looked.append(("compressed", far))
    for kind, seen in looked:
        cache, pages = a[f"{kind}_kv"], a[f"{kind}_block_table"]
        by_request = torch.zeros(R, seen.shape[1]).index_add(0, owner, seen.float()) > 0
        if pages is None:
            found[f"{kind}_kv"] = ~by_request
            continue
        size = cache.shape[1]
        r, at = by_request.nonzero(as_tuple=True)
        rows = torch.ones(cache.shape[:2], dtype=torch.bool)
        rows[pages[r, at // size].long(), at % size] = False
        found[f"{kind}_kv"] = rows
        found[f"{kind}_block_table"] = ~by_request.unflatten(1, (pages.shape[1], size)).any(2)
    blind = ~torch.cat([seen for _, seen in looked], 1).any(1)
    return found | dict(q=blind[:, None].expand(a["q"].shape[:2]))


def _indexer(a: Args) -> Masks:
    k, table, Tq = a["k"], a["block_table"], a["q"].shape[0]
    R, S = k.shape[:2] if table is None else (table.shape[0], table.shape[1] * k.shape[1])
    owner = torch.arange(Tq) * R // max(Tq, 1) if a["request_ids"] is None else a["request_ids"].long()
    longest = torch.zeros(R, dtype=torch.int32).scatter_reduce(0, owner, a["k_len"], "amax")
    seen = torch.arange(S) < longest[:, None]  # (R, S)
    blind = a["k_len"] == 0
    found = dict(q=blind[:, None].expand(a["q"].shape[:2]), weights=blind[:, None].expand_as(a["weights"]))
    rows = ~seen
    if table is not None:
        size = k.shape[1]
        r, at = seen.nonzero(as_tuple=True)
        rows = torch.ones(k.shape[:2], dtype=torch.bool)
        rows[table[r, at // size].long(), at % size] = False
        found["block_table"] = ~seen.unflatten(1, (table.shape[1], size)).any(2)
    found["k"] = rows
    for name, mask in (("k_scale", rows), ("q_scale", blind)):
        if a[name] is not None:
            found[name] = mask
    return found


def _topk(a: Args) -> Masks:
    if a["k_len"] is None:
        return {}
    return dict(scores=torch.arange(a["scores"].shape[1]) >= a["k_len"][:, None])


def _gather(a: Args) -> Masks:
    rows = torch.ones(len(a["cache"]), dtype=torch.bool)
    rows[a["slot"][a["slot"] >= 0].long()] = False
    return dict(cache=rows)


def _write(a: Args) -> Masks:
    return dict(kv=a["slot"] < 0)


def _write_pages(a: Args) -> Masks:
    return dict(key=a["slot"] < 0, value=a["slot"] < 0)


def _append(a: Args) -> Masks:
    if a["slot"] is None:
        return {}
    skipped = (a["slot"] < 0).expand(len(a["key"]))
    return dict(key=skipped, value=skipped)


def _moe(a: Args) -> Masks:
    chosen = torch.zeros(a["w13"].shape[0] + 1, dtype=torch.bool)
    chosen[a["indices"].long().flatten()] = True
    idle = ~chosen[:-1]  # -1 is the last
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_global", "w2_global", "bias13", "bias2")
    absent = a["indices"] < 0
    return {n: idle for n in names if a[n] is not None} | dict(weights=absent, x=absent.all(1)) | _padding(a)


def _padding(a: Args) -> Masks:
    """That of scales in the 128x4 layout, of matrices with the rows and blocks that the codes have."""
    found: Masks = {}
    codes = dict(scale="codes", w13_scale="w13", w2_scale="w2", o_scale="o", wo_scale="wo_a")
    for name, of in codes.items():
        if a.get(name) is None or a["scale_layout"] != "128x4":
            continue
        scale, coded = a[name], a[of]
        rows = coded.shape[:-1].numel() if of == "codes" else coded.shape[0] if of == "o" else coded.shape[-2]
        block = {"nvfp4": 16, "mxfp4": 32}[a["format"]]
        real = torch.ones(*scale.shape[:-2], rows, 2 * coded.shape[-1] // block, dtype=torch.uint8)
        assert from_128x4(to_128x4(real), *real.shape[-2:]).all()
        found[name] = to_128x4(real).view(scale.shape) == 0
    return found


def _partials(a: Args) -> Masks:
    empty = a["lse_partial"].isinf()
    return dict(out_partial=empty) | ({} if a["row_sum"] is None else dict(row_sum=empty))


def _hash(a: Args) -> Masks:
    used = torch.zeros(len(a["tid2eid"]), dtype=torch.bool)
    used[a["token_ids"].long()] = True
    return dict(tid2eid=~used)


def _slots(a: Args) -> Masks:
    """Slots that are written and not read: no step begins with them."""
    index, tokens = a["state_index"].long(), a["q"].shape[1]
    column = torch.zeros(len(index), dtype=torch.long) if a["accepted"] is None else a["accepted"].long() - 1
    first = index.gather(1, column.clamp(0, tokens - 1)[:, None])[:, 0]
    lost = torch.zeros(len(a["state"]), dtype=torch.bool)
    lost[index[(index >= 0) & (first >= 0)[:, None]]] = True
    lost[first[first >= 0]] = False
    return dict(state=lost[:, None, None, None].expand_as(a["state"]))


def _packed_slots(a: Args) -> Masks:
    """Tokens of no sequence, and those of sequences without a slot; slots whose sequences begin anew."""
    offsets, index, past = a["cu_seqlens"], a["state_index"].long(), a["past"]
    pool = "conv_state" if "conv_state" in a else "state"
    lost = torch.ones(len(a["q" if "q" in a else "x"]), dtype=torch.bool)
    for first, last, slot in zip(offsets, offsets[1:], index, strict=False):
        lost[first:last] = slot < 0
    fresh = torch.zeros(len(a[pool]), dtype=torch.bool)
    if past is not None:
        fresh[index[(index >= 0) & (past == 0) & (offsets.diff() > 0)]] = True
    names = [name for name in ("q", "k", "v", "g", "beta", "x") if name in a]
    tokens = {name: lost.view(-1, *[1] * (a[name].dim() - 1)).expand_as(a[name]) for name in names}
    return tokens | {pool: fresh.view(-1, *[1] * (a[pool].dim() - 1)).expand_as(a[pool])}


MASKED: dict[str, Callable[[Args], Masks]] = {
    "sdpa_decode": _caches,
    "sdpa_multi": _caches,
    "sdpa_decode_paged": _decode_paged,
    "flash_attention": _dense,
    "flash_attention_varlen": _varlen,
    "flash_attention_paged": _flash_paged,
    "sparse_fmha_with_swa": _sparse,
    "sparse_fmha_inverse_rope_fp4": _sparse,
    "indexer_scores": _indexer,
    "indexer_select": _indexer,
    "indexer_topk": _topk,
    "kv_cache_gather": _gather,
    "kv_cache_write": _write,
    "rope_kv_cache_write": _write,
    "paged_kv_cache_write": _write_pages,
    "rope_kv_cache_append": _append,
    "fp4_moe": _moe,
    "grouped_output_projection": _padding,
    "nvfp4_dequantize": lambda a: _padding(a | dict(format="nvfp4")),
    "mxfp4_dequantize": lambda a: _padding(a | dict(format="mxfp4")),
    "merge_partials": _partials,
    "route_hash": _hash,
    "causal_conv1d": _packed_slots,
    "gated_delta_rule": _packed_slots,
    "gated_delta_step": _slots,
    "kimi_delta_step": _slots,
}
ALL = {
    "gated_rmsnorm", "gated_rmsnorm_backward", "inverse_rope_fp4", "mxfp4_quantize", "nvfp4_quantize", "route_softmax",
    "route_sqrt_softplus", "linear_decode",
}  # fmt: skip


def test_of_every_op_it_is_said_what_it_sees():
    assert set(MASKED) | ALL == set(OPS) and not set(MASKED) & ALL


def poisoned(t: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``t`` with NaN where ``mask``, of its first axes, is set; integers become -1 and the largest in turns."""
    t, whole = t.clone(), mask.view(*mask.shape, *[1] * (t.dim() - mask.dim())).expand(t.shape)
    if t.dtype.itemsize == 1:
        t.view(torch.uint8)[whole] = 255 if t.dtype == torch.uint8 else 127  # nan of E4M3, a byte of no UE8M0
    elif t.dtype.is_floating_point:
        t[whole] = torch.nan
    else:
        count = torch.arange(int(whole.sum()))
        t[whole] = torch.where(count % 2 == 0, -1, 2**31 - 1).to(t.dtype)
    return t


def results(op: str, target: str, args: Args) -> list[torch.Tensor]:
    args = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()}
    with on(target):
        out = getattr(torch.ops.attnkit, op)(**args)
    written = [args[n] for n in OPS[op].mutated]
    return [*written, *(() if out is None else (out,) if isinstance(out, torch.Tensor) else out)]


def _some(op: str, index: int, arch: str) -> list[Case]:
    """Of a row the ordinary cases with the most features, of two dtypes or sizes, and one that has none."""
    plain = [c for c in cases(OPS[op], index, arch, covering=True) if not c.extra]
    plain = [c for c in plain if c.shape in OPS[op].module("cases").PARITY]
    plain.sort(key=lambda c: -len(c.features))
    return list(dict.fromkeys([*plain[:2], *plain[-1:]]))


# CuTeDSL compiles for seconds what clang does in one.
ROWS = [
    pytest.param(op, index, arch, id=f"{op}-{arch}-{index}", marks=pytest.mark.proof if arch.startswith("sm") else ())
    for op in MASKED
    for index, row in enumerate(OPS[op].kernels)
    for arch in row.archs
]


def judge(op: str, target: str, case: Case) -> int:
    record = OPS[op]
    given, kwargs = arguments(case)
    args = record.defaults | dict(zip(record.argnames, given, strict=False)) | kwargs
    if op == "fp4_moe":  # an expert that nobody chooses
        args["indices"] = args["indices"].masked_fill(args["indices"] == args["w13"].shape[0] - 1, -1)
    masks = MASKED[op](args)
    dirty = args | {n: poisoned(args[n], mask) for n, mask in masks.items()}
    for g, w in zip(results(op, target, dirty), results(op, target, args), strict=True):
        same = g.contiguous().view(torch.uint8) == w.contiguous().view(torch.uint8) if g.dim() else g == w
        assert bool(same.all()), f"{case.id}: {int((~same).sum())} of {same.numel()} bytes differ"
    return sum(int(mask.sum()) for mask in masks.values())


@pytest.mark.sample(13)
@pytest.mark.parametrize(("op", "index", "target"), ROWS)
def test_what_nobody_sees_changes_no_bit(op: str, index: int, target: str):
    needs(target)
    for case in _some(op, index, target):
        judge(op, target, case)


@pytest.mark.parametrize("op", MASKED)
def test_what_nobody_sees_changes_no_bit_of_the_definition(op: str):
    """On the CPU, over the cases of a row of each file: where the op has no row of its own there, the reference."""
    others = {row.on: (i, row.archs[0]) for i, row in enumerate(OPS[op].kernels) if row.on != "cpu"}
    assert sum(judge(op, "cpu", case) for each in others.values() for case in _some(op, *each)) > 0


ON_CPU = [op for op in MASKED if any(row.on == "cpu" for row in OPS[op].kernels)]


@pytest.mark.parametrize("op", ON_CPU)
def test_what_nobody_sees_changes_no_bit_by_pytorchs_own_operators(op: str, monkeypatch):
    """The CPU's rows without csrc/cpu, as where it is not built or the processor lacks what it needs."""
    monkeypatch.setattr(cpu, "kernels", None)
    dispatch._PLANS[op].clear()
    try:
        index = next(i for i, row in enumerate(OPS[op].kernels) if row.on == "cpu")
        for case in _some(op, index, "cpu"):
            judge(op, "cpu", case)
    finally:
        dispatch._PLANS[op].clear()
