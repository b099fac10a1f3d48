"""Rows of a cache in the order of a list; an absent one, -1, gives zeros."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

cache = torch.randn(16, 64, dtype=torch.bfloat16)  # (Nc, Rb)
slot = torch.tensor([9, 4, -1, 9])  # (R,) a row may be asked for twice
rows = torch.ops.attnkit.kv_cache_gather(cache, slot)  # (R, D)

assert torch.equal(rows[[0, 1, 3]], cache[[9, 4, 9]]) and not rows[2].any()
