"""Three entries a token: ties go to the lowest index, -1 stands where there are fewer."""

import torch

import torch_attnkit  # defines torch.ops.attnkit.*

scores = torch.tensor([[1.0, 5, 5, 2, 5, 5], [3, 1, 9, 9, 9, 9]])  # (Tq, S)
k_len = torch.tensor([6, 2], dtype=torch.int32)  # (Tq,)
indices = torch.ops.attnkit.indexer_topk(scores, k_len, topk=3)  # (Tq, K)

assert indices.tolist() == [[1, 2, 4], [0, 1, -1]]
