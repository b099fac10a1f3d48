"""Gated DeltaNet layers of the Qwen hybrids on gated_delta_step: decode steps, the state in the cache's own tensor.

transformers keeps the state of a layer as (B, Hv, K, V), the op as (B, Hv, V, K): behind a prompt the cache's tensor
becomes a view of one that lies as the op wants it. A step then changes it in place, where transformers makes a new one
and copies it. A tensor that lies otherwise, behind a reordering of beams for one, is copied there and back. Prompts,
steps of several tokens, recorded caches and training are transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from .plain import holds_plain, is_plain


class _GatedDeltaNet:
    """forward for a class whose decode step is a convolution, the gated delta rule and a gated norm."""

    attnkit_module: Any  # where the class and the functions that it calls are defined

    def forward(
        self: Any, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        states = self._attnkit_states(hidden_states, cache_params)
        if states is None:
            out = super().forward(  # type: ignore[misc]
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            _lay(cache_params, self.layer_idx)
            return out
        conv_state, state = states
        functions, batch = self.attnkit_module, hidden_states.shape[0]
        x = functions.apply_mask_to_padding_states(hidden_states, attention_mask)
        qkv, z, b, a = self._attnkit_projections(x)
        weight = self.conv1d.weight.squeeze(1)
        qkv = functions.causal_conv1d_update(qkv.transpose(1, 2), conv_state, weight, self.conv1d.bias, self.activation)
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        q, k, v = (
            part.unflatten(2, (-1, dim))
            for part, dim in zip(
                qkv.transpose(1, 2).split(sizes, 2), (self.head_k_dim, self.head_k_dim, self.head_v_dim), strict=True
            )
        )
        shared = state.mT.is_contiguous()
        pool = state.mT if shared else state.mT.contiguous()  # (B, Hv, V, K)
        slots = torch.arange(batch, dtype=torch.int32, device=state.device)[:, None]
        rows = torch.ops.attnkit.gated_delta_step(q, k, v, a, b, self.A_log, self.dt_bias, pool, slots)
        if not shared:
            state.copy_(pool.mT)
        normed = self.norm(rows.flatten(0, 2), z.reshape(-1, self.head_v_dim))
        return self.out_proj(normed.view(batch, 1, -1))

    def _attnkit_states(self: Any, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The states of the convolution and of the rule, where the step is the op's; else None."""
        if cache is None or x.shape[1] != 1 or cache.is_recording_past(self.layer_idx):
            return None
        conv_state, state = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
        plain = holds_plain(self) and is_plain(self.conv1d, nn.Conv1d)
        given = conv_state is not None and state is not None and state.dtype == torch.float32
        if not given or not plain or torch.is_grad_enabled():
            return None
        return conv_state, state


def _lay(cache: Any, layer_idx: int) -> None:
    """Let the state of a layer lie as the op wants it, if there is one."""
    states = getattr(cache.layers[layer_idx], "recurrent_states", None) if cache is not None else None
    if not states or torch.compiler.is_compiling():
        return
    state = states.get(0)
    if state is not None and state.dtype == torch.float32 and not state.mT.is_contiguous():
        states[0] = state.mT.contiguous().mT
        torch._dynamo.mark_static_address(states[0])


class _Next(_GatedDeltaNet):
    attnkit_module = modeling_qwen3_next

    def _attnkit_projections(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v side by side, z, b and a."""
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return torch.cat([part.flatten(2) for part in (q, k, v)], 2), z, b, a


class _Apart(_GatedDeltaNet):
    def _attnkit_projections(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


class AttnkitQwen3NextGatedDeltaNet(_Next, modeling_qwen3_next.Qwen3NextGatedDeltaNet):
    pass


class AttnkitQwen35GatedDeltaNet(_Apart, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
    attnkit_module = modeling_qwen3_5


class AttnkitQwen35MoeGatedDeltaNet(_Apart, modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet):
    attnkit_module = modeling_qwen3_5_moe


SWAPS: dict[type, type] = {
    modeling_qwen3_next.Qwen3NextGatedDeltaNet: AttnkitQwen3NextGatedDeltaNet,
    modeling_qwen3_5.Qwen3_5GatedDeltaNet: AttnkitQwen35GatedDeltaNet,
    modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet: AttnkitQwen35MoeGatedDeltaNet,
}
