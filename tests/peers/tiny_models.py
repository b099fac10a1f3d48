"""Models of every family that the transformers integration serves, small enough for tests, with weights that matter.

The library's own initial values hide mistakes: matrices of 0.02 make logits near 0, sinks and position biases are 0,
and a hash router sends every token to expert 0. Here matrices keep the size of what they are applied to, and norms,
sinks, biases and tables are random.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from torch_attnkit.integrations.transformers import routers

_BASE = dict(vocab_size=128, hidden_size=64, num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_DENSE = dict(intermediate_size=128, num_hidden_layers=2, num_key_value_heads=2, head_dim=16)
_SOFTCAP = dict(query_pre_attn_scalar=16, sliding_window=8)
_HYBRID = dict(
    num_hidden_layers=4, num_key_value_heads=2, head_dim=32, linear_conv_kernel_dim=4, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, max_position_embeddings=4096,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)  # fmt: skip
_QWEN_MOE = dict(
    moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=8, num_experts_per_tok=2
)  # fmt: skip
_GPT_OSS = dict(
    intermediate_size=64, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, num_local_experts=4,
    num_experts_per_tok=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
# 16 indexer heads: with few, relu gives scores of exactly 0, and which of equal scores is chosen is nobody's promise.
_V4 = dict(
    moe_intermediate_size=32, num_hidden_layers=4, num_key_value_heads=1, head_dim=64, partial_rotary_factor=0.25,
    q_lora_rank=32, num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, sliding_window=8, o_groups=2,
    layer_types=[
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    hc_mult=2, hc_sinkhorn_iters=3, o_lora_rank=16, index_n_heads=16, index_head_dim=32, index_topk=3,
    num_nextn_predict_layers=0, max_position_embeddings=4096,
)  # fmt: skip

# The heads of the real model: latents of 512 and 64 numbers, prompts of 192 and 128.
_V3 = dict(
    intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2, num_key_value_heads=4, n_routed_experts=4,
    num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=32,
    kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip

# family: model class, config class, arguments of the config
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DENSE),
    "mistral": ("MistralForCausalLM", "MistralConfig", _DENSE | dict(sliding_window=8)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DENSE | _SOFTCAP | dict(attn_logit_softcapping=5.0)),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _DENSE | _SOFTCAP | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", _GPT_OSS),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _HYBRID | dict(intermediate_size=128)),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _HYBRID | _QWEN_MOE),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _HYBRID | _QWEN_MOE | dict(intermediate_size=128)),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", _HYBRID | dict(intermediate_size=128)),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", _V4),
    "bert": ("BertModel", "BertConfig", dict(intermediate_size=64, num_hidden_layers=2)),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        dict(intermediate_size=64, num_hidden_layers=3, local_attention=8, global_attn_every_n_layers=3, eos_token_id=2,
             cls_token_id=1, sep_token_id=2),
    ),
}  # fmt: skip
_KIMI = dict(
    intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=5, num_key_value_heads=4, num_local_experts=4,
    num_experts_per_tok=2, n_shared_experts=1, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    linear_head_dim=32, linear_num_heads=3,
)  # fmt: skip
# Of which tests of their own have a part, and whole models run in the simulators alone.
SIMULATED = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _V3),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", _KIMI),
}
ENCODERS = ("bert", "modernbert")
DECODERS = tuple(name for name in FAMILIES if name not in ENCODERS)


@torch.no_grad()
def build(name: str, attention: str = "eager", **changes: Any) -> Any:
    """A float32 model of one family in eval mode, the same for the same arguments. ``changes``: config fields."""
    model_class, config_class, arguments = (FAMILIES | SIMULATED)[name]
    config = getattr(transformers, config_class)(**{**_BASE, **arguments, **changes})
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is not set below
        model = getattr(transformers, model_class)(config).eval()
    gen = torch.Generator().manual_seed(0)

    def normal(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape, generator=gen)

    for key, p in model.named_parameters():
        last = key.rsplit(".", 1)[-1]
        if "A_log" in last or "dt_bias" in last or last == "scale":
            continue  # decay rates and the like have a meaning of their own
        if "norm" in key.lower():
            p.add_(normal(p) * 0.1)
        else:
            p.copy_(normal(p) * (0.3 if p.ndim < 2 else 1.5 * p.shape[-1] ** -0.5))
    for key, b in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            b.copy_(normal(b) * 0.2)
        elif key.endswith("tid2eid"):
            rows = [torch.randperm(config.num_local_experts, generator=gen)[: b.shape[1]] for _ in range(b.shape[0])]
            b.copy_(torch.stack(rows))
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None  # every run generates as many tokens as it is asked for
    return model


def modules(model: nn.Module, part: str) -> list[Any]:
    """The modules whose class, or a base of it, has ``part`` in its name."""
    return [m for m in model.modules() if any(part in c.__name__ for c in type(m).__mro__)]


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids (batch, length) that no special token is among."""
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


def with_our_routers(model: Any) -> Any:
    for module in model.modules():
        module.__class__ = routers.SWAPS.get(type(module), type(module))
    return model
