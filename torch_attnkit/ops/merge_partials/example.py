"""Attention over 100 keys from attention over the first 60 and over the other 40; the sink joins at the end."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q, sink = torch.randn(2, 8, 64), torch.randn(8)  # (B, Hq, D), (Hq,)
k, v = torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)  # (B, Hkv, S, D)


def attend(keys: slice, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    kv_len = torch.full((2,), len(range(100)[keys]), dtype=torch.int32)
    out, lse = torch.ops.attnkit.sdpa_decode(q, k[:, :, keys], v[:, :, keys], kv_len, sink)
    return out, lse


parts = [attend(slice(0, 60)), attend(slice(60, 100))]
out_partial, lse_partial = (torch.stack(t) for t in zip(*parts, strict=True))  # (P, R, H, Dv), (P, R, H)
out, lse = torch.ops.attnkit.merge_partials(out_partial, lse_partial, sink)

torch.testing.assert_close(out, attend(slice(0, 100), sink)[0])
