"""What indexer_select counts as for torch.utils.flop_counter: its scores, which are its products."""

from torch_attnkit.ops.indexer_scores.flops import flops

__all__ = ["flops"]
