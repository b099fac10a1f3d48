"""Four draft tokens of a sequence are verified at once over a cache that holds them already."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q = torch.randn(1, 4, 8, 64)  # (B, T, Hq, D)
k_cache, v_cache = torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)  # (B, Hkv, S, D)
kv_len = torch.tensor([100], dtype=torch.int32)  # (B,) with the block of four

out, lse = torch.ops.attnkit.sdpa_multi(q, k_cache, v_cache, kv_len)

for i in range(4):  # each of them is a decode step of its own
    want, _ = torch.ops.attnkit.sdpa_decode(q[:, i], k_cache, v_cache, kv_len - 3 + i)
    torch.testing.assert_close(out[:, i], want)
