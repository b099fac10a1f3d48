"""Three new tokens go to a cache whose pages hold keys and values side by side; the second is padding and skipped."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

qkv = torch.randn(3, 8 + 2 + 2, 64, dtype=torch.bfloat16)  # (R, Hq + 2 Hkv, D), a product of q, k and v
_, key, value = qkv.split((8, 2, 2), 1)
pages = torch.zeros(10, 16, 2, 128, dtype=torch.bfloat16)  # (Np, Ps, Hkv, 2D)
k_cache, v_cache = pages.chunk(2, -1)
slot = torch.tensor([3 * 16 + 5, -1, 40])
torch.ops.attnkit.paged_kv_cache_write(key, value, k_cache, v_cache, slot)

assert torch.equal(k_cache[3, 5], key[0]) and torch.equal(v_cache[2, 8], value[2])
assert int((pages != 0).any(-1).any(-1).sum()) == 2
