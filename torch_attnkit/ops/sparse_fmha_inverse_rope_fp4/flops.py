"""What sparse_fmha_inverse_rope_fp4 counts as for torch.utils.flop_counter: its attention, which has the products."""

from torch_attnkit.ops.sparse_fmha_with_swa.flops import flops

__all__ = ["flops"]
