"""NVFP4 checkpoints in Model Optimizer's layout through ``from_pretrained``, against the numbers they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.peers.tiny_models import build, tokens, with_our_routers
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, modelopt

AGREE = 1e-10
IGNORE = ["lm_head", "*.gate", "*.shared_expert_gate", "model.layers.0.*_attn*", "*conv1d*", "*linear_attn*"]


def _quantised(weight: torch.Tensor, largest: float) -> dict[str, torch.Tensor]:
    """A published linear layer; ``largest``: of the numbers that its ``weight_scale_2`` was made for."""
    scale_2 = torch.tensor(largest / (6 * 448), dtype=torch.float32)
    codes, scale = torch.ops.attnkit.nvfp4_quantize(weight.float(), 1 / scale_2)
    parts = {"weight": codes, "weight_scale": scale.view(torch.float8_e4m3fn), "weight_scale_2": scale_2}
    return parts | {"input_scale": torch.tensor(0.5)}


def _read(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    scale, inverse = parts["weight_scale"].view(torch.uint8), 1 / parts["weight_scale_2"]
    return torch.ops.attnkit.nvfp4_dequantize(parts["weight"], scale, inverse, dtype=torch.float64)


def publish(model: nn.Module, ignored: Any = ()) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(tensors of the file, the numbers that they stand for under the model's own names) of a Qwen3-Next model."""
    file: dict[str, torch.Tensor] = {}
    values = {name: tensor.double() for name, tensor in model.state_dict().items()}
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, tensor in model.state_dict().items():
        parent, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, weight in enumerate(tensor):
                largest = float(weight.abs().max())
                halves = [_quantised(half, largest) for half in weight.chunk(2)]
                for half, parts in zip(("gate_proj", "up_proj"), halves, strict=True):
                    file |= {f"{parent}.{e}.{half}.{key}": part for key, part in parts.items()}
                values[name][e] = torch.cat([_read(parts) for parts in halves])
        elif last == "down_proj":
            for e, weight in enumerate(tensor):
                parts = _quantised(weight, float(weight.abs().max()))
                file |= {f"{parent}.{e}.down_proj.{key}": part for key, part in parts.items()}
                values[name][e] = _read(parts)
        elif parent in linears and last == "weight" and "self_attn" in parent and ".layers.0." not in parent:
            parts = _quantised(tensor, float(tensor.abs().max()))
            file |= {f"{parent}.{key}": part for key, part in parts.items()}
            values[name] = _read(parts)
        else:
            file[name] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in file.items()}, values


def write(folder: Path, config: Any, file: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(file, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": IGNORE} | changes
    quantised |= {"producer": {"name": "modelopt", "version": "0.40"}}
    described = config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """(folder, the model in the numbers of the file, its tensors)."""
    model = build("qwen3_next")
    file, values = publish(model)
    folder = write(tmp_path_factory.mktemp("modelopt") / "tiny", model.config, file)
    model = with_our_routers(model.double())
    model.load_state_dict(values)
    return folder, model, file


def test_experts_hold_the_bits_of_the_file_and_logits_agree(made):
    folder, eager, file = made
    ours, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    prefix = "model.layers.1.mlp.experts"
    held = ours.model.layers[1].mlp.experts
    for e in range(held.num_experts):
        halves = [file[f"{prefix}.{e}.{half}_proj.weight"] for half in ("gate", "up")]
        assert torch.equal(held.gate_up_proj_packed[e], torch.cat(halves))
        assert torch.equal(held.down_proj_scale[e], file[f"{prefix}.{e}.down_proj.weight_scale"].view(torch.uint8))
    assert isinstance(ours.model.layers[3].self_attn.q_proj.weight, nn.Parameter)
    with_our_routers(ours.eval().double())  # frequencies of positions, too
    prompt = tokens(2, 16)
    with torch.no_grad():
        want, got = eager(prompt).logits, ours(prompt).logits
        assert (got - want).abs().max() <= AGREE * want.abs().max()
    swapped = attnkit_model(ours, experts="nvfp4")
    steps = [m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (eager, swapped)]
    assert torch.equal(*steps)


def test_one_scale_for_gate_and_up():
    """transformers reports what a conversion raises while it loads, and raises an error of its own."""
    scales = {"gate": [torch.tensor(0.5), torch.tensor(0.25)], "up": [torch.tensor(0.5), torch.tensor(0.125)]}
    message = r"weight_scale_2 of gate and up of expert 1 are 0.25 and 0.125, accepted: equal ones"
    with pytest.raises(UnsupportedError, match=message):
        modelopt.GlobalScales(None).convert(scales, full_layer_name="experts.gate_up_proj_global")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8', accepted: 'NVFP4'"),
        ({"ignore": ["*.layers.1.mlp.experts*"]}, "layers.1.mlp.experts is left in numbers"),
    ],
)
def test_what_it_does_not_take_it_refuses(made, tmp_path, changes, message):
    _, eager, file = made
    with pytest.raises(UnsupportedError, match=message):
        AutoModelForCausalLM.from_pretrained(write(tmp_path / "other", eager.config, file, **changes))


def test_experts_stored_by_inputs_before_outputs_are_refused(made, tmp_path):
    """Model Optimizer exports those of GPT-OSS fused, with one scale for all."""
    _, _, file = made
    folder = write(tmp_path / "oss", build("gpt_oss").config, file)
    described = json.loads((folder / "config.json").read_text()) | {"architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedError, match=r"\(GptOssExperts\) is stored by inputs before outputs, accepted: "):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_checkpoint_without_some_experts_is_refused(made, tmp_path):
    """They would be left as memory was, with a line in a report."""
    _, eager, file = made
    less = {name: tensor for name, tensor in file.items() if "layers.2.mlp.experts.7." not in name}
    folder = write(tmp_path / "less", eager.config, less)
    with pytest.raises(UnsupportedError, match="weight_scale_2 of 93 products of experts, accepted: of all 96 in"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_published_model_is_saved_with_its_bits(made, tmp_path):
    """Scales that are no powers of two included; what was read back is saved in numbers."""
    folder, _, file = made
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    saved, states = load_file(tmp_path / "again" / "model.safetensors"), [m.state_dict() for m in (loaded, again)]
    assert (
        all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        and states[0].keys() == states[1].keys()
    )
    experts_of_file = {
        name: tensor for name, tensor in file.items() if re.search(r"experts\.\d+\..*\.weight(_scale)?$", name)
    }
    assert experts_of_file and all(torch.equal(saved[name], tensor) for name, tensor in experts_of_file.items())
    assert saved["model.layers.3.self_attn.q_proj.weight"].dtype == torch.float32
    ignored = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.3.self_attn.q_proj" in ignored and not any(".experts" in name for name in ignored)
