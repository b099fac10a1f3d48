"""A decode step of two sequences over caches of 8 rows: one token each, then a token of caches that are full."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

qkv = torch.randn(2, 8 + 2 + 2, 64)  # (B, Hq + 2 Hkv, D), a product of q, k and v
q, key, value = qkv.split((8, 2, 2), 1)
k_cache, v_cache = torch.zeros(2, 2, 2, 8, 64).unbind()  # (B, Hkv, S, D) each
angle = torch.rand(2, 1, 32)
slot = torch.tensor([3, -1])  # the second sequence is padding and skipped
q_out, _ = torch.ops.attnkit.rope_kv_cache_append(q, key, value, k_cache, v_cache, angle.cos(), angle.sin(), slot)

assert torch.equal(v_cache[0, :, 3], value[0]) and not v_cache[1].any()
a, b = q.chunk(2, -1)
assert torch.allclose(q_out[..., :32], a * angle.cos() - b * angle.sin())

before = v_cache.clone()
torch.ops.attnkit.rope_kv_cache_append(q, key, value, k_cache, v_cache, angle.cos(), angle.sin())
assert torch.equal(v_cache[:, :, :-1], before[:, :, 1:]) and torch.equal(v_cache[:, :, -1], value)
