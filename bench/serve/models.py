"""Models that ``bench.serve`` serves: configurations as published, and weights that are drawn by name.

There is no checkpoint: a tensor of one is drawn from a generator whose seed is a hash of its name, so that every
process has the same numbers on the same kind of device. Names and layouts are those of published checkpoints, which
vLLM's own loaders take, fused and shared among processes as it likes, and from which ``judge`` makes layers in float32.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

_BLOCK = 32  # numbers of MXFP4 that share a scale; 16 bytes
_RMS_OF_CODES = 2.93  # of the sixteen E2M1 numbers
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
    "llama-3-8b": ("Llama", _LLAMA3, _rope(5e5)),
    "deepseek-v3-dense": ("DeepseekV3", _DEEPSEEK_V3, _DEEPSEEK_ROPE),
    "gpt-oss-tiny": ("GptOss", _GPT_OSS | _SMALL | _FEW_EXPERTS, _GPT_OSS_ROPE),
    "qwen3-tiny": ("Qwen3", _QWEN3 | _SMALL, _rope(1e6)),
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
    def mxfp4(self) -> bool:
        """Whether experts are published in MXFP4."""
        return self.family == "GptOss"

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = dict(MODELS[self.name][1])
        sizes["num_hidden_layers"] = self.layers or sizes["num_hidden_layers"]
        # Sequences longer than any that the model was made for: the times are the same.
        sizes["max_position_embeddings"] = max(sizes["max_position_embeddings"], self.longest)
        if self.mxfp4:
            kinds = ("sliding_attention", "full_attention")
            sizes["layer_types"] = [kinds[i % 2] for i in range(sizes["num_hidden_layers"])]
        return sizes

    def config(self) -> Any:
        """transformers' configuration."""
        made = getattr(transformers, f"{self.family}Config")
        return made(**self.sizes, rope_parameters=dict(MODELS[self.name][2]), tie_word_embeddings=False)

    def save(self, folder: Path, *, packed: bool) -> None:
        """Write config.json into ``folder``; ``packed`` says that experts of GPT-OSS lie in MXFP4."""
        config_json = self.config().to_dict() | {"architectures": [f"{self.family}ForCausalLM"]}
        if packed and self.mxfp4:
            kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            config_json["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
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
            if packed and is_expert(name):
                blocks, scales = generate_packed(name, shape, device)
                yield f"{name}_blocks", blocks.unflatten(-1, (-1, _BLOCK // 2))
                yield f"{name}_scales", scales
            else:
                yield name, generate(name, shape, device)


def is_expert(name: str) -> bool:
    """Whether it is a matrix of all experts of GPT-OSS, which checkpoints have in MXFP4."""
    return name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


def _generator(name: str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
    return torch.Generator(device).manual_seed(seed)


def generate(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The tensor of a checkpoint in bfloat16. Activations keep their size: norms about 1, sinks N(1, 1), biases
    N(0, 0.01), embeddings N(0, 1), a matrix of K columns N(0, 1 / K); experts come from ``generate_packed``."""
    if is_expert(name):
        return _dense(*generate_packed(name, shape, device))
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
    return out.normal_(mean, deviation, generator=_generator(name, out.device))


def generate_packed(name: str, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (E, K, N) in MXFP4: codes (E, N, K / 2) and scales (E, N, K / 32); numbers of about N(0, 1 / K)."""
    experts, k, n = shape
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, n, k // _BLOCK, dtype=torch.uint8, device=device)
    generator = _generator(name, codes.device)
    lowest = 127 + math.floor(math.log2(k**-0.5 / _RMS_OF_CODES))  # at K 2880 2^-8, and 2^-7
    return codes.random_(0, 256, generator=generator), scales.random_(lowest, lowest + 2, generator=generator)


def _dense(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Experts (E, K, N) in bfloat16, which holds the numbers of MXFP4, by PyTorch alone: what is judged has no part in
    what judges, and a process without a compiler draws them too. Expert by expert, for an index takes 8 bytes."""
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16, device=codes.device)
    values = torch.cat([positive, -positive])
    out = codes.new_empty(codes.shape[0], codes.shape[2] * 2, codes.shape[1], dtype=torch.bfloat16)
    for expert, code, scale in zip(out, codes, scales, strict=True):
        both = torch.stack([code & 15, code >> 4], -1).flatten(-2)  # (N, K), the lower nibble first
        blocks = values[both.long()].unflatten(-1, (-1, _BLOCK))
        expert.copy_(torch.ldexp(blocks, scale.int()[..., None] - 127).flatten(-2).T)
    return out


def bytes_of(model: Model) -> tuple[int, int]:
    """Bytes of all weights, and of keys and values of a token in the layers that keep all of them, in 16 bits."""
    weights = sum(
        math.prod(shape) * 17 // 32 if model.mxfp4 and is_expert(name) else math.prod(shape) * 2
        for name, shape in model.shapes().items()
    )
    sizes = model.sizes
    full = sum(
        kind == "full_attention" for kind in sizes.get("layer_types", ["full_attention"] * sizes["num_hidden_layers"])
    )
    latent = sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"] if "kv_lora_rank" in sizes else 0
    return weights, full * 2 * (latent or 2 * sizes["num_key_value_heads"] * sizes["head_dim"])
