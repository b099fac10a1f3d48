"""A token attends the last 8 keys of its request, and three compressed entries that were chosen for it."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q = torch.randn(2, 4, 64)  # (Tq, Hq, D): one token of each of two requests
swa_kv, compressed_kv = torch.randn(2, 40, 64), torch.randn(2, 12, 64)  # (R, S, D), (R, C, D): keys are values
swa_end = torch.tensor([40, 25], dtype=torch.int32)  # (Tq,) where the windows end
chosen = torch.tensor([[0, 5, 11], [2, 3, -1]], dtype=torch.int32)  # (Tq, K)
out, lse, _ = torch.ops.attnkit.sparse_fmha_with_swa(q, swa_kv, swa_end, compressed_kv, chosen, window=8)

keys = torch.cat((swa_kv[1, 17:25], compressed_kv[1, 2:4]))  # what the second token sees, (10, D)
scores = q[1] @ keys.T * 64**-0.5  # (Hq, 10)
torch.testing.assert_close(out[1], scores.softmax(-1) @ keys)
torch.testing.assert_close(lse[1], scores.logsumexp(-1))
