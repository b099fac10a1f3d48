"""A model of the transformers library generates on the ops, and gives the tokens that its own code gives.

The model is a tiny GPT-OSS with random weights: sliding windows, a learned sink a head, grouped heads, experts.
``attnkit_model`` replaces its attention, routers and experts, and packs the expert weights to MXFP4. The yardstick is
transformers' eager code with expert weights that were rounded to MXFP4 and read back: both have the same numbers.

    python examples/generate_with_transformers.py

It needs ``pip install 'torch_attnkit[models]'`` and runs on the CPU in a few seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import torch_attnkit
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4

NEW_TOKENS = 12


@torch.no_grad()
def tiny_model() -> Any:
    """Two layers, one with a window of 8 tokens; weights larger than at training start, so that tokens vary."""
    config = GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape) * (1.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3))
    return model


def generate(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The new token ids, (B, NEW_TOKENS), chosen greedily."""
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
    return ids[:, prompt.shape[1] :]


def main() -> None:
    prompt = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(1))  # (B, T)
    want = generate(round_experts_to_fp4(tiny_model(), "mxfp4"), prompt)

    model = attnkit_model(tiny_model(), experts="mxfp4")
    print("replaced:", model.attnkit_swapped)
    with torch_attnkit.record() as ran:
        got = generate(model, prompt)

    for (op, where), calls in sorted(ran.calls.items()):
        print(f"{op:16} {calls:4} calls on {where}")
    print("tokens:", got.tolist())
    assert torch.equal(got, want), f"transformers' own code gives {want.tolist()}"
    print(f"all {got.numel()} tokens are those of transformers' own code")


if __name__ == "__main__":
    main()
