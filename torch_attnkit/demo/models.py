"""Small models with random weights from transformers' own configurations, one per architecture that the ops serve.

Every layer kind of the architecture occurs. Weights are drawn larger than at training start, so that logits depend
on every detail and the generated tokens vary; layers that initialise to a trivial constant are drawn as well.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 30522  # the tokenizer of the demo's encoder
_COMMON = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=4096)


def _gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **_COMMON,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=4,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return transformers.GptOssForCausalLM, config


def _qwen3_5() -> Any:
    config = transformers.Qwen3_5MoeTextConfig(
        **_COMMON,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    )
    return transformers.Qwen3_5MoeForCausalLM, config


def _deepseek_v4() -> Any:
    config = transformers.DeepseekV4Config(
        **_COMMON,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        partial_rotary_factor=0.25,
        q_lora_rank=64,
        num_experts_per_tok=3,
        n_routed_experts=8,
        n_shared_experts=1,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        hc_mult=2,
        hc_sinkhorn_iters=3,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=8,
        num_nextn_predict_layers=0,
    )
    return transformers.DeepseekV4ForCausalLM, config


# name -> (what builds class and config, the FP4 format of the expert weights)
ARCHITECTURES = {
    "GPT-OSS": (_gpt_oss, "mxfp4"),
    "Qwen3.5-MoE": (_qwen3_5, "nvfp4"),
    "DeepSeek-V4": (_deepseek_v4, "mxfp4"),
}


def build(name: str, seed: int = 0) -> Any:
    """A model of the architecture in float32 with transformers' eager attention; the same seed, the same weights."""
    model_class, config = ARCHITECTURES[name][0]()
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).eval().requires_grad_(False)
    gen = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if "A_log" in key or "dt_bias" in key or key.endswith("scale"):
            continue  # decay rates and gates keep the ranges that make a recurrence stable
        noise = torch.randn(weight.shape, generator=gen)
        if "norm" in key:
            weight.add_(noise, alpha=0.1)
        else:
            weight.copy_(noise * (0.3 if weight.ndim < 2 else 1.5 * weight.shape[-1] ** -0.5))
    for key, buffer in model.named_buffers():
        if key.endswith("tid2eid"):  # distinct experts for every token
            scores = torch.rand(buffer.shape[0], config.n_routed_experts, generator=gen)
            buffer.copy_(scores.argsort(-1)[:, : buffer.shape[1]])
        elif key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=gen) * 0.2)
    model.generation_config.eos_token_id = None
    return model
