"""FlashInfer: paged decode, planned outside the timing, and merging of attention states."""

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
    if op != "sdpa_decode_paged":
        return None
    q, k, v, table, kv_len, sink, kv_start = (*args, None, None)[:7]
    if sink is not None or kv_start is not None or kwargs.get("sink_tokens"):
        return None
    import flashinfer

    page = k.shape[1]
    pages = (kv_len + page - 1) // page
    indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    indices = torch.cat([table[b, :n] for b, n in enumerate(pages.tolist())])
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr, indices, (kv_len - 1) % page + 1, q.shape[1], k.shape[2], q.shape[2], page,
        q_data_type=q.dtype, kv_data_type=k.dtype, sm_scale=kwargs.get("scale"),
        window_left=kwargs.get("window", -1) - 1 if kwargs.get("window", -1) >= 0 else -1,
    )  # fmt: skip
    return lambda: wrapper.run(q, (k, v))
