"""A mixed batch over pages of 16 keys: a chunk of 20 tokens behind 30 that are cached, one token, and two drafts."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q = torch.randn(23, 8, 64)  # (Tq, Hq, D)
k_cache, v_cache = torch.randn(12, 16, 2, 64), torch.randn(12, 16, 2, 64)  # (Np, Ps, Hkv, D)
offsets = torch.tensor([0, 20, 21, 23], dtype=torch.int32)  # (B+1,) of the queries
block_table = torch.tensor([[3, 7, 0, 9], [5, 1, -1, -1], [3, 2, -1, -1]], dtype=torch.int32)  # (B, Mp)
kv_len = torch.tensor([50, 31, 18], dtype=torch.int32)  # (B,) with the queries' own keys

out, lse = torch.ops.attnkit.flash_attention_paged(q, k_cache, v_cache, offsets, block_table, kv_len)

# The second sequence alone is a decode step.
step, _ = torch.ops.attnkit.sdpa_decode_paged(q[20:21], k_cache, v_cache, block_table[1:2], kv_len[1:2])
torch.testing.assert_close(out[20:21], step)
