"""Tiny checkpoints with random weights, large enough that attention decides which token comes next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import torch_attnkit  # noqa: F401  defines torch.ops.attnkit.*

_SIZES = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
)  # fmt: skip
_WINDOW = 24  # shorter than the prompts, and no multiple of a page
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA2 = dict(
    sliding_window=_WINDOW, layer_types=_SLIDING, attn_logit_softcapping=5.0, final_logit_softcapping=30.0,
    query_pre_attn_scalar=32,
)  # fmt: skip
_GPT_OSS = dict(sliding_window=_WINDOW, layer_types=_SLIDING, num_local_experts=4, num_experts_per_tok=2)
_QWEN3_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
# Latents, heads and kind of rotation as published, one layer of a dense MLP and two of experts. vLLM's plain rotation
# takes heads for dense on a CPU, which parts of heads are not, and is wrong.
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=256, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=1.0,
)  # fmt: skip
_DEEPSEEK_V3 = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64,
    qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=2,
    n_shared_experts=1, n_group=2, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid",
    max_position_embeddings=1024, rope_parameters=_YARN,
)  # fmt: skip
CONFIGS = {
    "llama": ("Llama", _SIZES),
    "gemma2": ("Gemma2", _SIZES | _GEMMA2),
    "gpt_oss": ("GptOss", _SIZES | _GPT_OSS),
    "gpt_oss_mxfp4": ("GptOss", _SIZES | _GPT_OSS),
    "qwen3_moe_nvfp4": ("Qwen3Moe", _SIZES | _QWEN3_MOE),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK_V3),
}


@torch.no_grad()
def save(name: str, folder: Path) -> tuple[Path, Path]:
    """The checkpoint ``name`` in float32, the same weights each time: where it lies for vLLM's own way and for ours.
    Weights are numbers of bfloat16, so that a run in it differs by what it computes alone.

    These differ for FP4 experts, for which vLLM has no kernel on this CPU: it has the same numbers in float32.
    """
    family, sizes = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    for path, weight in model.named_parameters():
        if path.endswith("sinks"):
            torch.nn.init.normal_(weight, mean=1.0)
        elif weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.05 if "embed" in path else 2.0 * weight.shape[-1] ** -0.5)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    theirs, ours = folder / "dense", folder / "packed"
    if not name.endswith("fp4"):
        model.save_pretrained(theirs)
        return theirs, theirs
    (publish if name.endswith("mxfp4") else publish_nvfp4)(model, ours)
    model.save_pretrained(theirs)
    return theirs, ours


def publish(model: Any, folder: Path) -> None:
    """The model with its experts as GPT-OSS publishes them, blocks of 16 bytes (32 numbers) and a scale each; in the
    model they become the same numbers."""
    packed: dict[str, torch.Tensor] = {}
    for path, weight in model.named_parameters():
        if path.endswith(("gate_up_proj", "down_proj")):  # (E, K, N): scales run along K, which lies last in the file
            codes, scale = torch.ops.attnkit.mxfp4_quantize(weight.transpose(1, 2).contiguous())
            weight.copy_(torch.ops.attnkit.mxfp4_dequantize(codes, scale, dtype=torch.float32).transpose(1, 2))
            packed |= {f"{path}_blocks": codes.unflatten(2, (-1, 16)), f"{path}_scales": scale}
    folder.mkdir()
    rest = {path: weight.contiguous() for path, weight in model.state_dict().items() if f"{path}_blocks" not in packed}
    save_file(rest | packed, folder / "model.safetensors", metadata={"format": "pt"})
    extra = {"architectures": [type(model).__name__], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | extra))


def publish_nvfp4(model: Any, folder: Path) -> None:
    """The model with its experts as Model Optimizer publishes them: one by one, an E4M3 scale for 16 numbers and one
    power of two for an expert. In the model they become the same numbers."""
    packed: dict[str, torch.Tensor] = {}
    names: list[str] = []
    for path, weight in model.named_parameters():
        if not path.endswith(("experts.gate_up_proj", "experts.down_proj")):
            names += [path.removesuffix(".weight")] * (weight.dim() == 2)
            continue
        parts = ("gate_proj", "up_proj") if path.endswith("gate_up_proj") else ("down_proj",)
        home = path.rpartition(".")[0]
        for e, values in enumerate(weight):
            scale = torch.exp2((448 * 6 / values.abs().max()).log2().floor())
            codes, scales = torch.ops.attnkit.nvfp4_quantize(values.contiguous(), scale)
            values.copy_(torch.ops.attnkit.nvfp4_dequantize(codes, scales, scale, dtype=torch.float32))
            for part, c, s in zip(parts, codes.chunk(len(parts)), scales.chunk(len(parts)), strict=True):
                found = {"weight": c, "weight_scale": s.view(torch.float8_e4m3fn), "weight_scale_2": 1 / scale}
                packed |= {f"{home}.{e}.{part}.{key}": value.contiguous() for key, value in found.items()}
    folder.mkdir()
    rest = {path: weight.contiguous() for path, weight in model.state_dict().items() if "experts." not in path}
    save_file(rest | packed, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": names}
    extra = {"architectures": [type(model).__name__], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | extra))
