"""One decode step over a cache in pages of 16 keys; both sequences begin with the page 3."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q = torch.randn(2, 8, 64)  # (B, Hq, D)
k_cache, v_cache = torch.randn(10, 16, 2, 64), torch.randn(10, 16, 2, 64)  # (Np, Ps, Hkv, D)
block_table = torch.tensor([[3, 7, 0], [3, 1, -1]], dtype=torch.int32)  # (B, Mp); behind the length anything may stand
kv_len = torch.tensor([40, 20], dtype=torch.int32)  # (B,)

out, lse = torch.ops.attnkit.sdpa_decode_paged(q, k_cache, v_cache, block_table, kv_len)

k, v = (t[block_table[0].long()].flatten(0, 1).transpose(0, 1)[None] for t in (k_cache, v_cache))  # (1, Hkv, 48, D)
want, _ = torch.ops.attnkit.sdpa_decode(q[:1], k.contiguous(), v.contiguous(), kv_len[:1])
torch.testing.assert_close(out[:1], want)
