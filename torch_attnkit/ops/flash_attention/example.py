"""Causal attention of two sequences, the second of them 20 tokens shorter: kv_len says so."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q = torch.randn(2, 64, 8, 64)  # (B, T, Hq, D)
k, v = torch.randn(2, 64, 2, 64), torch.randn(2, 64, 2, 64)  # (B, S, Hkv, D): four query heads share a KV head
kv_len = torch.tensor([64, 44], dtype=torch.int32)  # (B,)
out, lse, _ = torch.ops.attnkit.flash_attention(q, k, v, kv_len=kv_len, causal=True)

q, k, v, out = (t[:1].transpose(1, 2) for t in (q, k, v, out))  # (1, H, T, D) of the first, as PyTorch has it
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, want)
