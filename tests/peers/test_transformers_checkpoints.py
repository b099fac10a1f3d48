"""Checkpoints with MXFP4 experts through ``from_pretrained``: fp4_moe's weights are the file's bytes.

The yardstick is transformers' own way, which makes numbers of the same bytes; in float64 the two agree to AGREE. The
routers are ours on both sides, because fp4_moe takes the weights of experts in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from tests.peers.tiny_models import build, tokens, with_our_routers
from torch_attnkit.integrations.transformers import attnkit_model, experts, mxfp4

AGREE = 1e-10
# The blocks that a published checkpoint keeps in the model's dtype.
UNQUANTISED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def published(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a GPT-OSS model as they are published: expert weights in blocks of 16 bytes with a scale each."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(experts.WEIGHTS):
            state[name] = tensor.contiguous()
            continue
        codes, scale = torch.ops.attnkit.mxfp4_quantize(tensor.transpose(1, 2).contiguous())  # (E, rows, K/2), K/32
        state[f"{name}_blocks"] = codes.unflatten(2, (-1, 16))
        state[f"{name}_scales"] = scale
    return state


def write(folder: Path, config: Any, state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": UNQUANTISED}
    described = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("gpt_oss")
    return write(tmp_path_factory.mktemp("checkpoints") / "tiny", model.config, published(model))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return with_our_routers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' own: numbers, in the dtype of the weights that they are loaded into."""
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float64)
    model.set_experts_implementation("eager")
    return with_our_routers(model.eval())


def test_experts_hold_the_bytes_of_the_file(folder, loaded):
    state = load_file(folder / "model.safetensors")
    held = [m for m in loaded.modules() if isinstance(m, GptOssExperts)]
    assert len(held) == 2 and loaded.config._experts_implementation == "attnkit"
    for i, module in enumerate(held):
        for name in experts.WEIGHTS:
            blocks = state[f"model.layers.{i}.mlp.experts.{name}_blocks"]
            assert torch.equal(getattr(module, f"{name}_packed"), blocks.flatten(2))
            assert torch.equal(getattr(module, f"{name}_scale"), state[f"model.layers.{i}.mlp.experts.{name}_scales"])
            assert not hasattr(module, name)


def test_logits_and_tokens_are_those_of_the_numbers_read_back(loaded, theirs):
    prompt = tokens(2, 20)
    with torch.no_grad():
        want, got = theirs(prompt).logits, loaded(prompt).logits
    assert (got - want).abs().max() <= AGREE * want.abs().max()
    steps = [m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (theirs, loaded)]
    assert torch.equal(*steps)


def test_attnkit_model_takes_it_as_it_is(folder, theirs):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    before = model.model.layers[0].mlp.experts.gate_up_proj_packed
    attnkit_model(model, experts="mxfp4")
    assert model.model.layers[0].mlp.experts.gate_up_proj_packed is before
    prompt = tokens(1, 12)
    with torch.no_grad():
        want, got = theirs(prompt).logits, model(prompt).logits
    assert (got - want).abs().max() <= AGREE * want.abs().max()


def test_it_is_saved_as_it_was_published(folder, loaded, tmp_path):
    loaded.save_pretrained(tmp_path / "again")
    state, saved = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert state.keys() == saved.keys()
    for name, tensor in state.items():
        assert torch.equal(saved[name], tensor.to(saved[name].dtype)), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64)
    assert torch.equal(
        again.model.layers[1].mlp.experts.down_proj_packed, loaded.model.layers[1].mlp.experts.down_proj_packed
    )


def test_who_asks_for_numbers_gets_numbers(theirs):
    """``dequantize=True`` is transformers' own path, and leaves ordinary weights."""
    assert all(isinstance(m.gate_up_proj, torch.nn.Parameter) for m in theirs.modules() if isinstance(m, GptOssExperts))


def test_models_without_our_experts_stay_with_transformers(folder, monkeypatch):
    """What transformers asks of its own path is asked then, with what ``from_pretrained`` was called with."""
    asked = []

    def asks(quantizer: Any, *args: Any, **kwargs: Any) -> None:
        asked.append(kwargs["device_map"])
        quantizer.quantization_config.dequantize = True

    monkeypatch.setattr(mxfp4, "runs", lambda module: False)
    monkeypatch.setattr(Mxfp4HfQuantizer, "validate_environment", asks)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert asked == [None]
    assert all(isinstance(m.gate_up_proj, torch.nn.Parameter) for m in model.modules() if isinstance(m, GptOssExperts))


# A model of GPT-OSS' form whose file has some 200 MB; its numbers do not matter.
_LARGE = dict(
    hidden_size=768, intermediate_size=1280, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=256, num_local_experts=32, num_experts_per_tok=4, pad_token_id=0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip
# Runs alone: what a process has held at most is known of whole processes only. Every weight is read once.
_PEAK = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
import torch_attnkit.integrations.transformers

def held(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) << 10

before = held("VmRSS")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert sum(int(t.view(torch.uint8).max()) for t in model.state_dict().values() if t.is_contiguous()) > 0
print(held("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_loading_holds_the_checkpoint_once(tmp_path):
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**_LARGE)
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    gen = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(experts.WEIGHTS):
            count, columns, rows = tensor.shape
            shape = (count, rows, columns // 32, 16)
            state[f"{name}_blocks"] = torch.randint(256, shape, dtype=torch.uint8, generator=gen)
            state[f"{name}_scales"] = torch.full(shape[:3], 120, dtype=torch.uint8)
        else:
            state[name] = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    folder = write(tmp_path / "large", config, state)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 190e6
    done = subprocess.run([sys.executable, "-c", _PEAK, str(folder)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) <= 1.1 * size
