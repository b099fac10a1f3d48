"""Models that ``bench.serve`` serves: configurations as published, and weights that are drawn by name.

There is no checkpoint: a tensor of one is drawn from a generator whose seed is a hash of its name, so that every
process has the same numbers on the same kind of device. Names and layouts are those of published checkpoints, which
vLLM's own loaders take, fused and shared among processes as it likes, and from which ``judge`` makes layers in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from . import packed as fp4
from .packed import is_expert

_GPT_OSS_ROPE = dict(
    rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip
_SMALL = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
)  # fmt: skip
_FEW_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=24)
_GPT_OSS = dict(
    vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, num_local_experts=32, num_experts_per_tok=4,
    sliding_window=128, swiglu_limit=7.0, rms_norm_eps=1e-5, attention_bias=True,
)  # fmt: skip
_QWEN3 = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, use_sliding_window=False,
)  # fmt: skip
_QWEN3_MOE = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, use_sliding_window=False,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
)  # fmt: skip
_FEW_NVFP4_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
_LLAMA3 = dict(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
# Multi-head latent attention, and the dense layers that DeepSeek-V3 begins with: its experts, of 22 GB a layer in 16
# bits, are in none of them.
_DEEPSEEK_V3 = dict(
    vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=16, num_attention_heads=128,
    num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, max_position_embeddings=163840, rms_norm_eps=1e-6, first_k_dense_replace=61,
)  # fmt: skip
_DEEPSEEK_ROPE = dict(
    rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=4096,
)  # fmt: skip
_FEW_LATENT_HEADS = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=64, max_position_embeddings=1024,
)  # fmt: skip


def _rope(theta: float) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=theta)


# Name: transformers' name of the family, sizes, rotary embedding.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt-oss-20b": ("GptOss", _GPT_OSS, _GPT_OSS_ROPE),
    "qwen3-8b": ("Qwen3", _QWEN3, _rope(1e6)),
    "qwen3-30b-a3b": ("Qwen3Moe", _QWEN3_MOE, _rope(1e6)),
    "llama-3-8b": ("Llama", _LLAMA3, _rope(5e5)),
    "deepseek-v3-dense": ("DeepseekV3", _DEEPSEEK_V3, _DEEPSEEK_ROPE),
    "gpt-oss-tiny": ("GptOss", _GPT_OSS | _SMALL | _FEW_EXPERTS, _GPT_OSS_ROPE),
    "qwen3-tiny": ("Qwen3", _QWEN3 | _SMALL, _rope(1e6)),
    "qwen3-moe-tiny": ("Qwen3Moe", _QWEN3_MOE | _SMALL | _FEW_NVFP4_EXPERTS, _rope(1e6)),
    "llama-3-tiny": ("Llama", _LLAMA3 | _SMALL, _rope(5e5)),
    "deepseek-v3-tiny": ("DeepseekV3", _DEEPSEEK_V3 | _FEW_LATENT_HEADS, _DEEPSEEK_ROPE),
}


@dataclass(frozen=True)
class Model:
    """A model of MODELS with so many layers, 0 for all of them. ``longest`` is the most tokens that a sequence has."""

    name: str
    layers: int = 0
    longest: int = 0

    @property
    def family(self) -> str:
        return MODELS[self.name][0]

    @property
    def packing(self) -> str | None:
        """How experts are published: mxfp4, or nvfp4 as Model Optimizer writes it; None for a model without any."""
        return {"GptOss": fp4.MXFP4, "Qwen3Moe": fp4.NVFP4}.get(self.family)

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = dict(MODELS[self.name][1])
        sizes["num_hidden_layers"] = self.layers or sizes["num_hidden_layers"]
        # Sequences longer than any that the model was made for: the times are the same.
        sizes["max_position_embeddings"] = max(sizes["max_position_embeddings"], self.longest)
        if self.family == "GptOss":
            kinds = ("sliding_attention", "full_attention")
            sizes["layer_types"] = [kinds[i % 2] for i in range(sizes["num_hidden_layers"])]
        return sizes

    def config(self) -> Any:
        """transformers' configuration."""
        made = getattr(transformers, f"{self.family}Config")
        return made(**self.sizes, rope_parameters=dict(MODELS[self.name][2]), tie_word_embeddings=False)

    def save(self, folder: Path, *, packed: bool) -> None:
        """Write config.json into ``folder``; ``packed`` says that experts lie in FP4."""
        config_json = self.config().to_dict() | {"architectures": [f"{self.family}ForCausalLM"]}
        if packed and self.packing == fp4.MXFP4:
            kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            config_json["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        elif packed and self.packing == fp4.NVFP4:
            kept = ["model.layers.*.self_attn*", "model.layers.*.mlp.gate", "model.embed_tokens", "lm_head"]
            config_json["quantization_config"] = {
                "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": fp4.BLOCK[fp4.NVFP4], "ignore": kept,
            }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_json, indent=1))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a checkpoint whose experts are not packed, by name."""
        with torch.device("meta"):
            model = getattr(transformers, f"{self.family}ForCausalLM")(self.config())
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    def checkpoint(self, device: torch.device, *, packed: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as a published checkpoint has them, one after the other."""
        for name, shape in self.shapes().items():
            if self.packing is not None and is_expert(name):
                yield from fp4.checkpoint(self.packing, name, shape, device, packed=packed)
            else:
                yield name, generate(name, shape, device)

    def generate(self, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The tensor of a checkpoint whose experts are not packed, in bfloat16."""
        if self.packing is not None and is_expert(name):
            return fp4.dense(self.packing, name, shape, device)
        return generate(name, shape, device)


def generate(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The tensor of a checkpoint in bfloat16. Activations keep their size: norms about 1, sinks N(1, 1), biases
    N(0, 0.01), embeddings N(0, 1), a matrix of K columns N(0, 1 / K). FP4 experts come from ``packed``."""
    mean, deviation = 0.0, shape[-1] ** -0.5
    if name.endswith("norm.weight"):
        mean, deviation = 1.0, 0.1
    elif name.endswith("sinks"):
        mean, deviation = 1.0, 1.0
    elif name.endswith("embed_tokens.weight"):
        deviation = 1.0
    elif name.endswith("bias"):
        deviation = 0.1
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return out.normal_(mean, deviation, generator=fp4.generator(name, out.device))


def bytes_of(model: Model) -> tuple[int, int]:
    """Bytes of all weights, and of keys and values of a token in the layers that keep all of them, in 16 bits."""
    weights = sum(
        math.prod(shape) * 2
        if model.packing is None or not is_expert(name)
        else math.prod(shape) * (fp4.BLOCK[model.packing] // 2 + 1) // fp4.BLOCK[model.packing]
        for name, shape in model.shapes().items()
    )
    sizes = model.sizes
    full = sum(
        kind == "full_attention" for kind in sizes.get("layer_types", ["full_attention"] * sizes["num_hidden_layers"])
    )
    latent = sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"] if "kv_lora_rank" in sizes else 0
    return weights, full * 2 * (latent or 2 * sizes["num_key_value_heads"] * sizes["head_dim"])
