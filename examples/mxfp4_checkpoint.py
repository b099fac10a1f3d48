"""A checkpoint whose experts were published in MXFP4: ``from_pretrained`` keeps the file's bytes, and the ops use them.

The checkpoint is a tiny GPT-OSS with random weights, written to a temporary folder in the form in which GPT-OSS is
published: expert weights as blocks of 16 bytes (32 numbers) with a scale each. transformers' own way makes ordinary
numbers of them; here they stay as they are, a little more than a quarter of bf16's memory, and ``fp4_moe`` multiplies
with them. Both ways give the same logits.

    python examples/mxfp4_checkpoint.py

It needs ``pip install 'torch_attnkit[models]'``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

import torch_attnkit
import torch_attnkit.integrations.transformers  # registers what keeps the bytes

EXPERTS = ("gate_up_proj", "down_proj")
# What a published checkpoint keeps in the model's dtype.
UNQUANTISED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@torch.no_grad()
def publish(folder: Path) -> None:
    """Write a checkpoint of two layers and four experts."""
    config = GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in GptOssForCausalLM(config).state_dict().items():
        weight = torch.randn(tensor.shape) * (1.5 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3)
        if name.endswith(EXPERTS):  # (E, K, N): scales run along K, which lies last in the file
            codes, scale = torch.ops.attnkit.mxfp4_quantize(weight.transpose(1, 2).contiguous())
            state[f"{name}_blocks"], state[f"{name}_scales"] = codes.unflatten(2, (-1, 16)), scale
        else:
            state[name] = weight
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": UNQUANTISED}
    described = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(described))


@torch.no_grad()
def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        publish(folder)
        file = load_file(folder / "model.safetensors")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
        )

    held = model.model.layers[0].mlp.experts
    same = torch.equal(held.gate_up_proj_packed, file["model.layers.0.mlp.experts.gate_up_proj_blocks"].flatten(2))
    print("the experts hold the bytes of the file:", same)
    assert same

    prompt = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(1))  # (B, T)
    with torch_attnkit.record() as ran:
        got = model(prompt).logits
    want = theirs(prompt).logits
    difference = float((got - want).abs().max() / want.abs().max())
    print(f"fp4_moe ran {ran.calls['fp4_moe', 'reference'] + ran.calls['fp4_moe', 'cpu']} times")
    print(f"largest difference of a logit to transformers' own way: {difference:.1e} of the largest logit")
    assert difference < 1e-4 and any(op == "fp4_moe" for op, _ in ran.calls)


if __name__ == "__main__":
    main()
