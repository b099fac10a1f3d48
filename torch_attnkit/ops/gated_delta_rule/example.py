"""Two prompts, one of which goes on from a state, in a pool of four slots."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

q, k = torch.randn(7, 2, 64), torch.randn(7, 2, 64)  # (Tq, Hk, K)
v = torch.randn(7, 4, 32)  # (Tq, Hv, V): two value heads share a key head
g, beta = -torch.rand(7, 4), torch.rand(7, 4)
state = torch.randn(4, 4, 32, 64)  # (Ns, Hv, V, K)
offsets = torch.tensor([0, 5, 7], dtype=torch.int32)
slots, past = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
rule = torch.ops.attnkit.gated_delta_rule

whole = state.clone()
out = rule(q, k, v, g, beta, whole, offsets, slots, past)

# The first prompt in two parts: the second goes on where the first ends.
for begin, end, before in ((0, 2, 0), (2, 5, 2)):
    part = [t[begin:end] for t in (q, k, v, g, beta)]
    offset = torch.tensor([0, end - begin], dtype=torch.int32)
    got = rule(*part, state, offset, slots[:1], torch.tensor([before], dtype=torch.int32))
    torch.testing.assert_close(got, out[begin:end], rtol=1e-4, atol=1e-5)
torch.testing.assert_close(state[3], whole[3], rtol=1e-4, atol=1e-5)
