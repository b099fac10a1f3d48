"""Gated RMS norms of the Qwen hybrids and of Olmo-Hybrid on gated_rmsnorm.

The op rounds once, at the store. The replaced forward also rounds the normalised value and its product with the
weight to the model dtype, so in bfloat16 the two differ, the op being the closer to exact arithmetic.
"""

from __future__ import annotations

import torch
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from torch_attnkit.core import UnsupportedError

from .plain import holds_plain


class _GatedRMSNorm:
    """forward for a class with ``weight`` (N), ``variance_epsilon`` and ``activation``."""

    def attnkit_check(self) -> None:
        activation = getattr(self, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedError(f"{type(self).__name__}: activation is {activation!r}, accepted: 'silu'")

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not holds_plain(self):  # type: ignore[arg-type]
            return super().forward(hidden_states, gate)  # type: ignore[misc]
        out = torch.ops.attnkit.gated_rmsnorm(hidden_states, gate, self.weight, eps=self.variance_epsilon)  # type: ignore[attr-defined]
        return out.to(hidden_states.dtype)


class AttnkitQwen35RMSNormGated(_GatedRMSNorm, Qwen3_5RMSNormGated):
    pass


class AttnkitQwen35MoeRMSNormGated(_GatedRMSNorm, Qwen3_5MoeRMSNormGated):
    pass


class AttnkitQwen3NextRMSNormGated(_GatedRMSNorm, Qwen3NextRMSNormGated):
    pass


class AttnkitOlmoHybridRMSNormGated(_GatedRMSNorm, OlmoHybridRMSNormGated):
    pass


SWAPS: dict[type, type] = {
    OlmoHybridRMSNormGated: AttnkitOlmoHybridRMSNormGated,
    Qwen3_5RMSNormGated: AttnkitQwen35RMSNormGated,
    Qwen3_5MoeRMSNormGated: AttnkitQwen35MoeRMSNormGated,
    Qwen3NextRMSNormGated: AttnkitQwen3NextRMSNormGated,
}
