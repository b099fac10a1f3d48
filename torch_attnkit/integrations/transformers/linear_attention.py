"""Gated DeltaNet layers of the Qwen hybrids and of Olmo-Hybrid: prompts on gated_delta_rule, decode steps on
gated_delta_step, and the convolution ahead of both on causal_conv1d. Of Kimi Linear and GLM-5 decode steps alone, on
kimi_delta_step.

transformers keeps the state of a layer as (B, Hv, K, V), the ops as (B, Hv, V, K): behind a prompt the cache's tensor
is a view of one that lies as the ops want it. They change it in place, where transformers makes a new one and copies
it. A tensor that lies otherwise, behind a reordering of beams for one, is copied there and back. Prompts and the
convolution are transformers' own where the ops have no kernel, as on a CPU; recorded caches, packed sequences and
training are so everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.kernels.delta.problem import WIDTHS

from .plain import holds_plain, is_plain
from .products import has_row, target_arch


class _GatedDeltaNet:
    """forward for a class that is a convolution, the gated delta rule and a gated norm."""

    attnkit_module: Any  # where the class and the functions that it calls are defined
    attnkit_norm, attnkit_out = "norm", "out_proj"  # names of the modules behind the rule

    def forward(
        self: Any, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        batch, length = hidden_states.shape[:2]
        kept = self._attnkit_states(cache_params)
        step = length == 1 and all([state is not None for state in kept])
        if not self._attnkit_runs(cache_params, *kept) or not (step or self._attnkit_takes(hidden_states, kwargs)):
            out = super().forward(  # type: ignore[misc]
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            _lay(cache_params, self.layer_idx)
            return out
        x = self.attnkit_module.apply_mask_to_padding_states(hidden_states, attention_mask)
        qkv, z, b, a = self._attnkit_projections(x)
        offsets, slots = _spans(cache_params, batch, length, x.device)
        if self._attnkit_convolves(qkv, kept[0]):
            qkv = self._attnkit_op_convolution(qkv, cache_params, kept[0], (offsets, slots))
        else:
            qkv = self._attnkit_convolution(qkv, cache_params, kept[0] if step else None)
        heads = self._attnkit_heads(qkv)
        if step:
            rows = self._attnkit_step(heads, a, b, kept[1], slots)
        else:
            rows = self._attnkit_prompt(heads, a, b, kept[1], cache_params, (offsets, slots))
        normed = getattr(self, self.attnkit_norm)(rows.flatten(0, -2), z.reshape(-1, self.head_v_dim))
        return getattr(self, self.attnkit_out)(normed.view(batch, length, -1))

    def _attnkit_convolution(self: Any, qkv: torch.Tensor, cache: Any, state: torch.Tensor | None) -> torch.Tensor:
        """q, k and v of all tokens (B, T, channels) behind the convolution; ``state`` is that of a step."""
        functions, weight, x = self.attnkit_module, self.conv1d.weight.squeeze(1), qkv.transpose(1, 2)
        if state is not None:
            x = functions.causal_conv1d_update(x, state, weight, self.conv1d.bias, self.activation)
        else:
            if cache is not None:
                x = cache.update_conv_state(x, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
            x = functions.causal_conv1d_fn(x, weight, self.conv1d.bias, activation=self.activation)
            x = x[:, :, -qkv.shape[1] :]
        return x.transpose(1, 2).contiguous()

    def _attnkit_op_convolution(
        self: Any, qkv: torch.Tensor, cache: Any, state: torch.Tensor | None, spans: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The same by the op, which leaves the last tokens in ``state``; without one it begins with zeros."""
        weight = self.conv1d.weight.squeeze(1)  # (C, W)
        if state is None:
            state = qkv.new_zeros(len(qkv), *weight.shape)
            if cache is not None:
                cache.update_conv_state(qkv.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        out = torch.ops.attnkit.causal_conv1d(qkv.flatten(0, 1), weight, state, *spans, self.conv1d.bias)
        return out.view(qkv.shape)

    def _attnkit_convolves(self: Any, qkv: torch.Tensor, state: torch.Tensor | None) -> bool:
        """Whether causal_conv1d has a kernel for these tokens, and takes the cache's state as it lies."""
        dtype, width = self.conv1d.weight.dtype, self.conv1d.weight.shape[2]
        if self.activation not in ("silu", "swish") or width not in WIDTHS or qkv.dtype != dtype:
            return False
        given = state is None or (state.dtype == dtype and state.is_contiguous() and state.shape[2] >= width - 1)
        return given and has_row("causal_conv1d", qkv.device, dtype)

    def _attnkit_heads(self: Any, qkv: torch.Tensor) -> list[torch.Tensor]:
        """q, k (B, T, Hk, K) and v (B, T, Hv, V)."""
        sizes, dims = (self.key_dim, self.key_dim, self.value_dim), (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        return [part.unflatten(2, (-1, dim)) for part, dim in zip(qkv.split(sizes, 2), dims, strict=True)]

    def _attnkit_step(
        self: Any, heads: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        shared = state.mT.is_contiguous()
        pool = state.mT if shared else state.mT.contiguous()  # (B, Hv, V, K)
        rows: torch.Tensor = self._attnkit_op_step(heads, a, b, pool, slots[:, None])
        if not shared:
            state.copy_(pool.mT)
        return rows

    def _attnkit_op_step(
        self: Any, heads: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        gates = a, b, self.A_log, self.dt_bias
        return torch.ops.attnkit.gated_delta_step(*heads, *gates, pool, slots, beta_scale=self._attnkit_beta_scale)

    def _attnkit_prompt(
        self: Any, heads: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor, state: torch.Tensor | None, cache: Any,
        spans: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Rows (B * T, Hv, V) of tokens that begin with ``state``, or with zeros."""
        batch, _, Hv, V = heads[2].shape
        shared = state is not None and state.mT.is_contiguous()
        if state is None:
            pool = a.new_zeros(batch, Hv, V, heads[0].shape[3], dtype=torch.float32)
        else:
            pool = state.mT if shared else state.mT.contiguous()
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        packed = [t.flatten(0, 1) for t in (*heads, g, self._attnkit_beta_scale * b.sigmoid())]
        rows = torch.ops.attnkit.gated_delta_rule(*packed, pool, *spans)
        if cache is not None and not shared:
            cache.update_recurrent_state(pool.mT, self.layer_idx)
        return rows

    @property
    def _attnkit_beta_scale(self: Any) -> float:
        """2 where eigenvalues may be negative."""
        return 2.0 if getattr(self, "allow_neg_eigval", False) else 1.0

    def _attnkit_states(self: Any, cache: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the convolution and of the rule, as they are before these tokens; None where there are none."""
        if cache is None:
            return None, None
        return cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)

    def _attnkit_runs(self: Any, cache: Any, conv_state: torch.Tensor | None, state: torch.Tensor | None) -> bool:
        """Whether the tokens may be the ops', as far as modules and cache go."""
        if torch.is_grad_enabled() or not holds_plain(self) or not is_plain(self.conv1d, nn.Conv1d):
            return False
        if cache is not None and cache.is_recording_past(self.layer_idx):
            return False
        return (conv_state is None) == (state is None) and (state is None or state.dtype == torch.float32)

    def _attnkit_takes(self: Any, x: torch.Tensor, given: dict[str, Any]) -> bool:
        """Whether gated_delta_rule has a kernel for a prompt. Packed sequences cut the convolution, too."""
        if any(given.get(name) is not None for name in _PACKED):
            return False
        sizes = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        return _has_kernel(x.device, self.conv1d.weight.dtype, sizes)


_PACKED = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> bool:
    return _row(target_arch(device), dtype, sizes)


@functools.cache
def _row(arch: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> bool:
    """Whether gated_delta_rule has a row on ``arch`` for heads of q and k, of v, K and V."""
    (Hk, Hv, K, V), op = sizes, OPS["gated_delta_rule"]
    key, value, gate = torch.empty(1, Hk, K, dtype=dtype), torch.empty(1, Hv, V, dtype=dtype), torch.empty(1, Hv)
    ids = torch.zeros(2, dtype=torch.int32)
    call = op.bind((key, key, value, gate, gate, torch.empty(1, Hv, V, K), ids, ids[:1], None, None, True, 1e-6))
    return any(arch in row.archs and row.refusal(call) is None for row in op.kernels)


def _spans(cache: Any, batch: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of sequences of one length, and slots 0 to batch - 1. The cache keeps those of a step, for all layers and
    later steps, as long as it lives: CUDA graphs read them. What a graph is about to fill is not kept."""
    keeps = cache is not None and length == 1 and not torch.compiler.is_compiling()
    kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] = vars(cache).setdefault("attnkit_spans", {}) if keeps else {}
    if (batch, device) in kept:
        return kept[batch, device]
    offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        kept[batch, device] = offsets, slots
    return offsets, slots


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
        """q, k and v side by side, z, b and a. The products have those of a key head side by side."""
        Hk, K, values = self.num_k_heads, self.head_k_dim, self.value_dim // self.num_k_heads
        mixed = self.in_proj_qkvz(x).unflatten(2, (Hk, -1))  # (B, T, Hk, 2 K + 2 values)
        qkv = mixed.new_empty(*x.shape[:2], 2 * self.key_dim + self.value_dim)
        qk, v = qkv.split((2 * self.key_dim, self.value_dim), 2)
        qk.unflatten(2, (2, Hk, K)).copy_(mixed[..., : 2 * K].unflatten(3, (2, K)).transpose(2, 3))
        v.unflatten(2, (Hk, values)).copy_(mixed[..., 2 * K : 2 * K + values])
        gates = self.in_proj_ba(x).unflatten(2, (Hk, 2, -1)).transpose(2, 3).flatten(3)  # (B, T, 2, Hv)
        return qkv, mixed[..., 2 * K + values :], *gates.unbind(2)


class _Apart(_GatedDeltaNet):
    def _attnkit_projections(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


class AttnkitQwen3NextGatedDeltaNet(_Next, modeling_qwen3_next.Qwen3NextGatedDeltaNet):
    pass


class AttnkitQwen35GatedDeltaNet(_Apart, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
    attnkit_module = modeling_qwen3_5


class AttnkitQwen35MoeGatedDeltaNet(_Apart, modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet):
    attnkit_module = modeling_qwen3_5_moe


class AttnkitOlmoHybridGatedDeltaNet(_GatedDeltaNet, modeling_olmo_hybrid.OlmoHybridGatedDeltaNet):
    attnkit_module = modeling_olmo_hybrid
    attnkit_norm, attnkit_out = "o_norm", "o_proj"

    def _attnkit_projections(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = torch.cat([project(x) for project in (self.q_proj, self.k_proj, self.v_proj)], 2)
        return qkv, self.g_proj(x), self.b_proj(x), self.a_proj(x)


class _KimiDelta(_GatedDeltaNet):
    """A gate for each channel. Prompts are transformers' own: no op has them."""

    attnkit_norm, attnkit_out = "o_norm", "o_proj"

    @property
    def head_v_dim(self: Any) -> int:
        return int(self.head_dim)

    def _attnkit_projections(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = torch.cat([project(x) for project in (self.q_proj, self.k_proj, self.v_proj)], 2)
        gate = self.forget_gate
        return qkv, self.g_b_proj(self.g_a_proj(x)), self.b_proj(x), gate.f_b_proj(gate.f_a_proj(x))

    def _attnkit_heads(self: Any, qkv: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(2, (-1, self.head_dim)) for part in qkv.chunk(3, 2)]

    def _attnkit_op_step(
        self: Any, heads: list[torch.Tensor], a: torch.Tensor, b: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        gate, bound = self.forget_gate, getattr(self.forget_gate, "safe_gate_lower_bound", None)
        gates = a.view(heads[1].shape), b, gate.A_log.flatten(), gate.dt_bias.view(heads[1].shape[2:])
        return torch.ops.attnkit.kimi_delta_step(*heads, *gates, pool, slots, lower_bound=bound)

    def _attnkit_runs(self: Any, *given: Any) -> bool:
        return is_plain(self.forget_gate, *_GATES) and super()._attnkit_runs(*given)

    def _attnkit_takes(self: Any, x: torch.Tensor, given: dict[str, Any]) -> bool:
        return False


_GATES = modeling_kimi_linear.KimiLinearForgetGate, modeling_glm5_next.Glm5NextTextForgetGate


class AttnkitKimiLinearDeltaAttention(_KimiDelta, modeling_kimi_linear.KimiLinearDeltaAttention):
    attnkit_module = modeling_kimi_linear


class AttnkitGlm5NextTextLinearAttention(_KimiDelta, modeling_glm5_next.Glm5NextTextLinearAttention):
    attnkit_module = modeling_glm5_next


SWAPS: dict[type, type] = {
    modeling_glm5_next.Glm5NextTextLinearAttention: AttnkitGlm5NextTextLinearAttention,
    modeling_kimi_linear.KimiLinearDeltaAttention: AttnkitKimiLinearDeltaAttention,
    modeling_olmo_hybrid.OlmoHybridGatedDeltaNet: AttnkitOlmoHybridGatedDeltaNet,
    modeling_qwen3_next.Qwen3NextGatedDeltaNet: AttnkitQwen3NextGatedDeltaNet,
    modeling_qwen3_5.Qwen3_5GatedDeltaNet: AttnkitQwen35GatedDeltaNet,
    modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet: AttnkitQwen35MoeGatedDeltaNet,
}
