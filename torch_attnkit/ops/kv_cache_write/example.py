"""Three new rows go to slots of a cache of FP8 rows; the second is padding and skipped."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

kv = torch.randn(3, 512, dtype=torch.bfloat16)  # (R, D)
cache = torch.zeros(16, 584, dtype=torch.uint8)  # (Nc, Rb): 448 bytes of E4M3, 64 channels of bf16, scales
slot = torch.tensor([9, -1, 4])  # (R,)
torch.ops.attnkit.kv_cache_write(kv, cache, slot, format="fp8", rope_dim=64)

assert cache.any(1).nonzero().flatten().tolist() == [4, 9]
back = torch.ops.attnkit.kv_cache_gather(cache, slot, format="fp8", head_dim=512, dtype=torch.bfloat16)  # (R, D)
assert torch.equal(back[:, 448:], kv[:, 448:] * (slot >= 0)[:, None])  # rotated channels are kept as they are
assert (back[0] - kv[0]).norm() < 0.04 * kv[0].norm()
