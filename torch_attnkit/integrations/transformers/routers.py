"""Expert routers of GPT-OSS, Qwen and DeepSeek-V4 on the routing ops.

Each returns what the replaced forward does: logits, weights in the dtype of the logits, int64 indices. The ops score
in float32 whatever the model dtype, and break ties by the lowest index. Where fp4_moe is next, it takes the op's own
float32 weights and int32 indices: nothing is rounded or converted in between. ``attnkit_feeds``, which attnkit_model
gives a router, is the config of its packed experts and says whether that is so. A router whose weights are subclasses
of tensors runs the forward it had.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import SqrtSoftplusActivation
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from torch_attnkit.core import UnsupportedError

from .plain import holds_plain
from .products import linear

ops = torch.ops.attnkit
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits (R, E), weights (R, K), indices (R, K)


def _logits(router: Any, hidden_states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if hidden_states.dim() != 2:
        hidden_states = hidden_states.reshape(-1, router.hidden_dim)  # (R, N)
    return linear(hidden_states, router.weight, bias)  # (R, E)


def _routed(router: Any, logits: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> Routed:
    feeds = getattr(router, "attnkit_feeds", None)
    # Behind the property: a config looks names up in Python, at a tenth of a router's time on a CPU.
    if feeds is not None and feeds.__dict__["_experts_implementation_internal"] == "attnkit":
        return logits, weights, indices
    return logits, weights.to(logits.dtype), indices.long()


class AttnkitGptOssTopKRouter(GptOssTopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Routed:
        if not holds_plain(self):
            return super().forward(hidden_states)
        logits = _logits(self, hidden_states, self.bias)
        return _routed(self, logits, *ops.route_softmax(logits, topk=self.top_k))


class _QwenTopKRouter:
    def forward(self, hidden_states: torch.Tensor) -> Routed:
        if not holds_plain(self):  # type: ignore[arg-type]
            return super().forward(hidden_states)  # type: ignore[misc]
        logits = _logits(self, hidden_states)
        renormalize = bool(vars(self).get("norm_topk_prob", True))
        found = ops.route_softmax(logits, topk=self.top_k, softmax_first=True, renormalize=renormalize)  # type: ignore[attr-defined]
        return _routed(self, logits, *found)


class AttnkitQwen35MoeTopKRouter(_QwenTopKRouter, Qwen3_5MoeTopKRouter):
    pass


class AttnkitQwen3NextTopKRouter(_QwenTopKRouter, Qwen3NextTopKRouter):
    pass


class _SqrtSoftplus:
    def attnkit_check(self) -> None:
        found = type(self.score_fn).__name__  # type: ignore[attr-defined]
        if found != SqrtSoftplusActivation.__name__:
            raise UnsupportedError(f"{type(self).__name__}: scoring_func is {found}, accepted: 'sqrtsoftplus'")


class AttnkitDeepseekV4TopKRouter(_SqrtSoftplus, DeepseekV4TopKRouter):
    def forward(self, hidden_states: torch.Tensor) -> Routed:
        if not holds_plain(self):
            return super().forward(hidden_states)
        logits = _logits(self, hidden_states)
        bias = self.e_score_correction_bias.float()  # (E,)
        found = ops.route_sqrt_softplus(logits, bias, topk=self.top_k, route_scale=self.routed_scaling_factor)
        return _routed(self, logits, *found)


class AttnkitDeepseekV4HashRouter(_SqrtSoftplus, DeepseekV4HashRouter):
    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None) -> Routed:
        if input_ids is None:
            raise UnsupportedError(
                "DeepseekV4HashRouter: input_ids is None, accepted: token ids; hash routing chooses experts by token,"
                " so the model cannot be called with inputs_embeds"
            )
        if not holds_plain(self):
            return super().forward(hidden_states, input_ids)
        logits = _logits(self, hidden_states)
        found = ops.route_hash(logits, input_ids.reshape(-1), self.tid2eid, route_scale=self.routed_scaling_factor)
        return _routed(self, logits, *found)


SWAPS: dict[type, type] = {
    GptOssTopKRouter: AttnkitGptOssTopKRouter,
    Qwen3_5MoeTopKRouter: AttnkitQwen35MoeTopKRouter,
    Qwen3NextTopKRouter: AttnkitQwen3NextTopKRouter,
    DeepseekV4TopKRouter: AttnkitDeepseekV4TopKRouter,
    DeepseekV4HashRouter: AttnkitDeepseekV4HashRouter,
}
