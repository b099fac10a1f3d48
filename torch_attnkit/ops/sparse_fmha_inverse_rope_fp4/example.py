"""Attention whose output is only ever an FP4 operand: codes and scales come out, not numbers."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

ops = torch.ops.attnkit
q, swa_kv = torch.randn(3, 4, 64), torch.randn(1, 40, 64)  # (Tq, Hq, D), (R, S, D)
swa_end = torch.tensor([38, 39, 40], dtype=torch.int32)  # (Tq,)
angle = torch.rand(3, 8)  # (Tq, R2)
cos, sin = angle.cos(), angle.sin()
codes, o_scale = ops.sparse_fmha_inverse_rope_fp4(q, swa_kv, swa_end, cos, sin, window=8)  # (Tq, Hq, D/2), (.., D/16)

out, _, _ = ops.sparse_fmha_with_swa(q, swa_kv, swa_end, window=8)  # the two ops that it is
want = ops.inverse_rope_fp4(out, cos, sin)
assert torch.equal(codes, want[0]) and torch.equal(o_scale, want[1])
