"""What kimi_delta_step counts as for torch.utils.flop_counter: as a gate for each head does."""

from torch_attnkit.ops.gated_delta_step.flops import flops

__all__ = ["flops"]
