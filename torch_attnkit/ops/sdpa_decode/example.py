"""One decode step of two sequences over preallocated caches, with a window and a learned sink a head."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q = torch.randn(2, 8, 64)  # (B, Hq, D): one new token a sequence
k_cache, v_cache = torch.randn(2, 2, 256, 64), torch.randn(2, 2, 256, 64)  # (B, Hkv, S, D)
kv_len = torch.tensor([200, 35], dtype=torch.int32)  # (B,) keys that are filled, the new token's among them
sink = torch.zeros(8)  # (Hq,) a logit that joins the denominator

out, lse = torch.ops.attnkit.sdpa_decode(q, k_cache, v_cache, kv_len, sink, window=128)

k, v = (t[0, :, 72:200].repeat_interleave(4, 0) for t in (k_cache, v_cache))  # (Hq, 128, D): the window of sequence 0
scores = (k @ q[0, :, :, None])[..., 0] * 64**-0.5  # (Hq, 128)
weights = torch.cat((scores, sink[:, None]), 1).softmax(1)[:, :-1]  # (Hq, 128)
torch.testing.assert_close(out[0], (weights[:, None] @ v)[:, 0])
torch.testing.assert_close(lse[0], scores.logsumexp(1))  # without the sink
