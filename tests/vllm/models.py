"""Tiny checkpoints with random weights, large enough that attention decides which token comes next."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

_SIZES = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
)  # fmt: skip
_WINDOW = 24  # shorter than the prompts, and no multiple of a page
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": ("Llama", _SIZES),
    "gemma2": ("Gemma2", _SIZES | dict(
        sliding_window=_WINDOW, layer_types=_SLIDING, attn_logit_softcapping=5.0, final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
    )),
    "gpt_oss": ("GptOss", _SIZES | dict(
        sliding_window=_WINDOW, layer_types=_SLIDING, num_local_experts=4, num_experts_per_tok=2,
    )),
}  # fmt: skip


def save(name: str, folder: Path) -> None:
    """The checkpoint ``name`` in float32, the same weights each time."""
    family, sizes = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).float()
        for path, weight in model.named_parameters():
            if path.endswith("sinks"):
                torch.nn.init.normal_(weight, mean=1.0)
            elif weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.05 if "embed" in path else 2.0 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
