"""Four experts with MXFP4 weights, two for each of five tokens."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

ops = torch.ops.attnkit
E, N, M = 4, 64, 96
w13, w2 = torch.randn(E, 2 * M, N) * N**-0.5, torch.randn(E, N, M) * M**-0.5  # [gate; up] and down
x = torch.randn(5, N)  # (Tq, N)
weights, indices = ops.route_softmax(torch.randn(5, E), topk=2)  # (Tq, K) each

packed = [t for w in (w13, w2) for t in ops.mxfp4_quantize(w)]  # codes and scales of both
out = ops.fp4_moe(x, weights, indices, *packed, format="mxfp4")  # (Tq, N)

w13, w2 = ops.mxfp4_dequantize(*packed[:2]), ops.mxfp4_dequantize(*packed[2:])  # what the codes stand for
gate, up = torch.einsum("emn,tn->etm", w13, x).chunk(2, -1)  # (E, Tq, M) each
every = torch.einsum("enm,etm->ten", w2, torch.nn.functional.silu(gate) * up)  # (Tq, E, N)
chosen = every.gather(1, indices.long()[..., None].expand(-1, -1, N))  # (Tq, K, N)
torch.testing.assert_close(out, (weights[..., None] * chosen).sum(1))
