"""FlashInfer: decode and packed queries over pages, MLA's decode of latent vectors, all planned outside the timing,
merging of states, and a decode step of Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WORKSPACE = 128 << 20  # bytes; what its documentation recommends


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op == "merge_partials":
        out, lse, sink, row_sum = (*args, None, None)[:4]
        if sink is not None or row_sum is not None or kwargs.get("dtype") is not None:
            return None
        import flashinfer

        states, scores = out.transpose(0, 1).contiguous(), (lse.transpose(0, 1) * 1.4426950408889634).contiguous()
        return lambda: flashinfer.merge_states(states, scores)[0]
    if op == "sdpa_decode":
        return _latent(args, kwargs) or _contiguous(args, kwargs)
    if op == "flash_attention_paged":
        return _packed(args, kwargs)
    if op == "gated_delta_step":
        return _delta_step(args, kwargs)
    if op != "sdpa_decode_paged":
        return None
    q, k, v, table, kv_len, sink, kv_start = (*args, None, None)[:7]
    if sink is not None or kv_start is not None or kwargs.get("sink_tokens"):
        return None
    return _planned(q, (k, v), table, kv_len, "NHD", k.shape[1], k.shape[2], kwargs)


def _delta_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """One token a sequence, states in a pool."""
    q, k, v, a, b, A_log, dt_bias, state, index, accepted = args
    given = q.shape[1] == 1 and accepted is None and q.dtype in (torch.float16, torch.bfloat16)
    if not given or kwargs["beta_scale"] != 1 or min(q.shape[3], v.shape[3]) < 128 or v.shape[3] % 8:
        return None
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    slots, output = index[:, 0].contiguous(), torch.empty_like(v)
    options = dict(initial_state=state, initial_state_indices=slots, output=output)
    options |= dict(scale=kwargs.get("scale"), use_qk_l2norm=kwargs["qk_l2norm"])
    return lambda: gated_delta_rule_decode_pretranspose(q, k, v, None, A_log, a, dt_bias, b, **options)[0]


def _contiguous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """A contiguous cache of E4M3 as pages of 16 keys whose heads are far apart."""
    q, k, v, kv_len, *rest = args
    B, Hkv, S, D = k.shape
    plain = not any(isinstance(x, torch.Tensor) for x in rest) and not kwargs.get("sink_tokens")
    if k.dtype == q.dtype or S % 16 or v.shape != k.shape or not (k.is_contiguous() and v.is_contiguous() and plain):
        return None
    pages, by_sequence = ((B - 1) * Hkv + 1) * (S // 16), Hkv * S // 16
    caches = tuple(t.as_strided((pages, Hkv, 16, D), (16 * D, S * D, D, 1)) for t in (k, v))
    first = torch.arange(0, B * by_sequence, by_sequence, dtype=torch.int32, device=q.device)  # (B,)
    table = first[:, None] + torch.arange(S // 16, dtype=torch.int32, device=q.device)  # (B, S / 16)
    return _planned(q, caches, table, kv_len, "HND", 16, Hkv, kwargs)


def _planned(
    q: torch.Tensor, caches: tuple[torch.Tensor, ...], table: torch.Tensor, kv_len: torch.Tensor, layout: str,
    page: int, kv_heads: int, kwargs: dict[str, Any],
) -> Callable[[], Any]:  # fmt: skip
    import flashinfer

    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
    wrapper.plan(
        *_pages(table, kv_len, page), q.shape[1], kv_heads, q.shape[2], page,
        q_data_type=q.dtype, kv_data_type=caches[0].dtype, sm_scale=kwargs.get("scale"), window_left=_left(kwargs),
    )  # fmt: skip
    return lambda: wrapper.run(q, caches)


def _packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    q, k, v, cu_q, table, kv_len, sink = (*args, None)[:7]
    if sink is not None or kwargs.get("sink_tokens") or k.dtype != q.dtype:
        return None
    import flashinfer

    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        cu_q, *_pages(table, kv_len, k.shape[1]), q.shape[1], k.shape[2], q.shape[2], k.shape[1],
        head_dim_vo=v.shape[-1], causal=kwargs.get("causal", True), sm_scale=kwargs.get("scale"),
        window_left=_left(kwargs), logits_soft_cap=kwargs.get("softcap"), q_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, (k, v))


def _pages(table: torch.Tensor, kv_len: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each sequence's pages begin among them all, the pages, and the keys on each last one."""
    pages = (kv_len + page - 1) // page
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    return indptr, torch.cat([table[b, :n] for b, n in enumerate(pages.tolist())]), (kv_len - 1) % page + 1


def _left(kwargs: dict[str, Any]) -> int:
    """Keys to the left of a query; ours counts the query itself."""
    window = kwargs.get("window", -1)
    return window - 1 if window >= 0 else -1


def _latent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """One KV head of 512 columns that are keys and values: MLA without its rotary columns, every key a page."""
    q, k, v, kv_len, *rest = args
    plain = not any(isinstance(x, torch.Tensor) for x in rest) and kwargs.get("window", -1) < 0
    if v is not k or q.shape[2] != 512 or k.shape[1] != 1 or not plain or kwargs.get("softcap"):
        return None
    import flashinfer

    B, Hq, D = q.shape
    S = k.shape[2]
    rows = k.view(B * S, 1, D)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device))
    starts = torch.arange(B + 1, dtype=torch.int32, device=q.device)  # (B + 1,)
    pages = torch.cat([torch.arange(b * S, b * S + n, device=q.device) for b, n in enumerate(kv_len.tolist())])
    ends = torch.cat([kv_len.new_zeros(1), kv_len.cumsum(0, dtype=torch.int32)])
    scale = D**-0.5 if kwargs.get("scale") is None else kwargs["scale"]
    wrapper.plan(starts, ends, pages.int(), kv_len, Hq, D, 0, 1, False, scale, q.dtype, k.dtype)
    q_rotary, k_rotary = q.new_empty(B, Hq, 0), k.new_empty(B * S, 1, 0)
    return lambda: wrapper.run(q, q_rotary, rows, k_rotary)
