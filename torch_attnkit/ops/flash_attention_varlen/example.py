"""Three prompts of 5, 30 and 12 tokens, packed one after another without padding."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

lengths = [5, 30, 12]
q = torch.randn(sum(lengths), 8, 64)  # (Tq, Hq, D)
k, v = torch.randn(sum(lengths), 2, 64), torch.randn(sum(lengths), 2, 64)  # (Tk, Hkv, D)
offsets = torch.tensor([0, 5, 35, 47], dtype=torch.int32)  # (B+1,)
out, lse, _ = torch.ops.attnkit.flash_attention_varlen(q, k, v, offsets, offsets, causal=True, max_seqlen_q=30)

middle = [t[None, 5:35] for t in (q, k, v)]  # the second prompt alone
want, _, _ = torch.ops.attnkit.flash_attention(*middle, causal=True)
torch.testing.assert_close(out[5:35], want[0])
