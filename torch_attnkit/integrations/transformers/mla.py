"""DeepSeek-V3's attention over its cache of latents, without their expansion to keys and values (MLA, absorbed).

transformers caches one latent of ``kv_lora_rank`` numbers a token, and a rotated part that all heads share, and a
decode step expands all of them to keys and values of every head. Here the query of a decode step is taken to the
latents instead, so that sdpa_decode has one KV head of D = ``kv_lora_rank + qk_rope_head_dim`` (576) whose values are
the first ``kv_lora_rank`` (512) of its columns, and the result is taken back. Prompts are expanded as the model does.

It is done where sdpa_decode takes such heads: on a CPU all, on GPUs those of the released models, 576 over 512.
Elsewhere a decode step expands, too, and so it does where the projection is no plain Linear (``plain``): quantised,
offloaded, with an adapter or a hook.

Source: DeepSeek-V2 (arXiv 2405.04434), 2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import target_of

from .plain import is_plain

_Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor] | None]


class AttnkitDeepseekV3Attention(DeepseekV3Attention):
    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing yet: the attention function, which knows the queries, asks attnkit_keys."""
        if self.config._attn_implementation != "attnkit":
            return super().expand_kv(kv_nope, k_rot)
        return kv_nope, k_rot

    def attnkit_keys(self, query: torch.Tensor, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> _Attended:
        """Query (B, Hq, T, D) and what the cache holds, (B, 1, S, L) and (B, 1, S, R), as query, keys and values to
        attend, and what makes (B, T, Hq, Dv) of what comes of it, None where it is that."""
        rank = self.kv_lora_rank
        if query.shape[2] != 1 or not self._absorbs(query.device, rank + self.qk_rope_head_dim, rank):
            return (query, *super().expand_kv(kv_nope, k_rot), None)
        weight = self.kv_b_proj.weight.view(self.num_heads, -1, rank)  # (Hq, nope + Dv, L)
        to_keys, to_values = weight.split((self.qk_nope_head_dim, self.v_head_dim), 1)
        plain, rotated = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        latent = torch.cat((plain @ to_keys, rotated), -1)  # (B, Hq, 1, L + R)
        keys = torch.cat((kv_nope, k_rot), -1)  # (B, 1, S, L + R)

        def back(out: torch.Tensor) -> torch.Tensor:
            return (out.transpose(1, 2) @ to_values.mT).transpose(1, 2)  # (B, 1, Hq, L) -> (B, 1, Hq, Dv)

        return latent, keys, keys[..., :rank], back

    def _absorbs(self, device: torch.device, dim: int, dim_v: int) -> bool:
        projection = self.kv_b_proj
        return is_plain(projection, nn.Linear) and projection.bias is None and _has_row(device, dim, dim_v)


# In a trace a constant: which target it is says a context variable, which none can ask for.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_row(device: torch.device, dim: int, dim_v: int) -> bool:
    arch, sizes = target_of(device).arch, {"D": dim, "Dv": dim_v}
    rows = (row.dims for row in OPS["sdpa_decode"].kernels if arch in row.archs)
    return any(all(n in dims.get(axis, (n,)) for axis, n in sizes.items()) for dims in rows)


SWAPS: dict[type, type] = {DeepseekV3Attention: AttnkitDeepseekV3Attention}
