"""Heads of a query are normed and rotated by 90 degrees, and the key, rotated likewise, goes to slot 2 of a cache."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q, kv = torch.randn(1, 4, 16), torch.randn(1, 16)  # (Tq, Hq, D), (Tq, D)
cache, slot = torch.zeros(4, 16), torch.tensor([2])  # (Nc, D), (Tq,)
cos, sin = torch.zeros(1, 4), torch.ones(1, 4)  # (Tq, R2): the last 8 channels are 4 pairs
out = torch.ops.attnkit.rope_kv_cache_write(q, kv, cache, slot, cos, sin, rope_dim=8)  # (Tq, Hq, D)

normed = torch.nn.functional.rms_norm(q, (16,), eps=1e-6)
rotated = torch.stack((-normed[..., 9::2], normed[..., 8::2]), -1).flatten(-2)  # a pair (a, b) becomes (-b, a)
torch.testing.assert_close(out, torch.cat((normed[..., :8], rotated), -1))
assert torch.equal(cache[2, :8], kv[0, :8]) and torch.equal(cache[2, 8::2], -kv[0, 9::2])
