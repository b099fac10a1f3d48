"""Models whose experts attnkit_model packed, saved and loaded again: the bits of all outputs, or a refusal."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config, utils
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

from tests.peers import families
from tests.peers.tiny_models import build, frozen, modules, tokens, with_our_routers
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, modelopt, saving

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PACKED = re.findall(r"^\| (\w+) \|.*\| equal \|$", PAGE.read_text("utf-8"), re.MULTILINE)
FUSED_BY_INPUTS = ("AriaTextForCausalLM", "GptOssForCausalLM")
formats = pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])


def load(folder: Path, name: str = "AutoModelForCausalLM", **kwargs: Any) -> Any:
    """The model, once transformers has reported nothing missing, left over or newly initialised."""
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model.eval()


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.sample(5)
@formats
@pytest.mark.parametrize("name", PACKED)
def test_every_family_that_packs_is_loaded_with_equal_bits_or_refused(name, format, tmp_path):
    model = attnkit_model(families.build(name, "eager"), experts=format)
    if format == "nvfp4" and name in FUSED_BY_INPUTS:
        with pytest.raises(
            UnsupportedError, match=r"is stored by inputs before outputs, .*; accepted: experts='mxfp4'"
        ):
            model.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        return
    model.save_pretrained(tmp_path)
    again = attnkit_model(load(tmp_path, name), experts=format)
    assert again.attnkit_swapped == model.attnkit_swapped
    assert torch.equal(families.forward(model, None), families.forward(again, None))


def test_every_family_of_the_page_is_tried():
    assert len(PACKED) >= 38


@formats
def test_names_dtypes_and_config_are_those_of_published_checkpoints(format, tmp_path):
    attnkit_model(families.build("MixtralForCausalLM", "eager"), experts=format).save_pretrained(tmp_path)
    state, config = saved(tmp_path), json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    found = {name: t for name, t in state.items() if name.startswith("model.layers.1.block_sparse_moe.experts.")}
    shapes = {name.partition("experts.")[2]: (t.dtype, tuple(t.shape)) for name, t in found.items()}
    u8, f8, f32 = torch.uint8, torch.float8_e4m3fn, torch.float32
    if format == "mxfp4":
        assert shapes == {
            "gate_up_proj_blocks": (u8, (4, 128, 1, 16)), "gate_up_proj_scales": (u8, (4, 128, 1)),
            "down_proj_blocks": (u8, (4, 32, 2, 16)), "down_proj_scales": (u8, (4, 32, 2)),
        }  # fmt: skip
        assert config["quant_method"] == "mxfp4"
    else:
        assert shapes == {
            f"{e}.{part}.{key}": found
            for e in range(4)
            for part, rows, columns in (("w1", 64, 32), ("w2", 32, 64), ("w3", 64, 32))
            for key, found in {
                "weight": (u8, (rows, columns // 2)),
                "weight_scale": (f8, (rows, columns // 16)),
                "weight_scale_2": (f32, ()),
            }.items()
        }
        assert (config["quant_method"], config["quant_algo"], config["group_size"]) == ("modelopt", "NVFP4", 16)
    ignored = config["modules_to_not_convert" if format == "mxfp4" else "ignore"]
    layer = "model.layers.*" if format == "mxfp4" else "model.layers.0"
    assert {"lm_head", f"{layer}.block_sparse_moe.gate", f"{layer}.self_attn.q_proj"} <= set(ignored)
    assert not any(name.endswith("experts") for name in ignored)


def test_experts_that_no_mapping_names_are_saved_one_by_one(tmp_path):
    attnkit_model(families.build("GraniteMoeForCausalLM", "eager"), experts="nvfp4").save_pretrained(tmp_path)
    names = {name for name in saved(tmp_path) if ".layers.0.block_sparse_moe.experts.3." in name}
    keys = ("weight", "weight_scale", "weight_scale_2")
    assert {name.partition("experts.3.")[2] for name in names} == {
        f"{part}_proj.{key}" for part in ("gate", "up", "down") for key in keys
    }


@pytest.mark.parametrize(
    ("family", "format", "dtype"),
    [
        ("gpt_oss", "mxfp4", torch.float16),
        ("deepseek_v4", "nvfp4", torch.bfloat16),
        ("qwen3_5_moe", "nvfp4", torch.bfloat16),
    ],
)
def test_shards_and_dtypes(family, format, dtype, tmp_path):
    model = frozen(attnkit_model(build(family), experts=format).to(dtype))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = load(tmp_path)
    assert again.dtype == dtype
    again = frozen(attnkit_model(again.to(dtype), experts=format))  # frequencies of positions, too
    ids = tokens(2, 11)
    assert torch.equal(model(ids).logits, again(ids).logits)
    steps = [m.generate(ids, max_new_tokens=5, do_sample=False) for m in (model, again)]
    assert torch.equal(*steps)


@formats
def test_what_was_loaded_is_saved_again_as_it_was(format, tmp_path):
    attnkit_model(families.build("Qwen3MoeForCausalLM", "eager"), experts=format).save_pretrained(tmp_path / "first")
    load(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = saved(tmp_path / "first"), saved(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first if first[name].ndim
    )
    configs = [
        json.loads((tmp_path / f / "config.json").read_text())["quantization_config"] for f in ("first", "second")
    ]
    assert configs[0] == configs[1]


def test_a_model_that_was_loaded_in_numbers_is_packed_and_saved(tmp_path):
    families.build("MixtralForCausalLM", "eager").save_pretrained(tmp_path / "numbers")
    model = attnkit_model(load(tmp_path / "numbers"), experts="nvfp4")
    model.save_pretrained(tmp_path / "packed")
    again = attnkit_model(load(tmp_path / "packed"), experts="nvfp4")
    assert torch.equal(families.forward(model, None), families.forward(again, None))


def test_transformers_reads_a_packed_gpt_oss_in_numbers(tmp_path):
    """Without this integration: its own quantizer makes numbers of the blocks."""
    model = frozen(attnkit_model(build("gpt_oss"), experts="mxfp4").double())
    model.save_pretrained(tmp_path)
    config = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float64)
    theirs.set_experts_implementation("eager")
    theirs = frozen(with_our_routers(theirs.eval()))
    ids = tokens(2, 9)
    want = theirs(ids).logits
    assert float((want - model(ids).logits).abs().max()) <= 1e-10 * float(want.abs().max())


def test_push_to_hub_sends_what_loads(tmp_path, monkeypatch):
    sent = tmp_path / "sent"

    class Hub:
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})()

    monkeypatch.setattr(utils.hub, "hf_api", Hub)
    monkeypatch.setattr(
        utils.hub, "create_and_tag_model_card", lambda *_, **__: type("Card", (), {"save": lambda *_: 0})()
    )
    upload = lambda self, folder, *_, **__: shutil.copytree(folder, sent)
    monkeypatch.setattr(utils.hub.PushToHubMixin, "_upload_modified_files", upload)
    model = attnkit_model(families.build("Qwen3MoeForCausalLM", "eager"), experts="mxfp4")
    model.push_to_hub("someone/packed")
    again = attnkit_model(load(sent), experts="mxfp4")
    assert torch.equal(families.forward(model, None), families.forward(again, None))


@formats
def test_a_copy_and_a_pickle_save_as_well(format, tmp_path):
    model = attnkit_model(families.build("Qwen3MoeForCausalLM", "eager"), experts=format)
    for n, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        other.save_pretrained(tmp_path / str(n))
        again = attnkit_model(load(tmp_path / str(n)), experts=format)
        assert torch.equal(families.forward(model, None), families.forward(again, None))


@formats
def test_a_model_inside_another_is_saved_by_itself(format, tmp_path):
    whole = attnkit_model(families.build("Qwen3MoeForCausalLM", "eager"), experts=format)
    whole.save_pretrained(tmp_path / "whole")
    for n, outer in enumerate((whole, attnkit_model(load(tmp_path / "whole"), experts=format))):
        outer.model.save_pretrained(tmp_path / str(n))
        again = attnkit_model(load(tmp_path / str(n), "AutoModel"), experts=format)
        assert torch.equal(again(tokens(2, 9))[0], whole.model(tokens(2, 9))[0])


def _with_images() -> Any:
    """A model whose experts are published fused, by inputs before outputs, and held the other way round."""
    text = dict(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]),
    )  # fmt: skip
    images = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    )  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=images)
    return frozen(transformers.Qwen3VLMoeForConditionalGeneration(config).eval())


@formats
def test_a_language_model_beside_an_encoder_of_images(format, tmp_path):
    model = attnkit_model(_with_images(), experts=format)
    model.save_pretrained(tmp_path)
    again = attnkit_model(load(tmp_path, "Qwen3VLMoeForConditionalGeneration"), experts=format)
    assert torch.equal(again(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


# What is refused.


def test_experts_that_a_mapping_puts_together_in_another_way_are_not_saved():
    own = WeightConverter("experts.*.gate_up.weight", "experts.gate_up_proj", [MergeModulelist(0), Transpose(1, 2)])
    fused = torch.zeros(4, 8, 2)
    message = (
        r"layers\.0\.mlp\.experts\.gate_up_proj is put together by .*Transpose.*, accepted: experts that are published"
    )
    with pytest.raises(UnsupportedError, match=message):
        list(modelopt._cut(None, "layers.0.mlp.experts.gate_up_proj", fused, [own.reverse_transform()]))


def test_a_part_of_a_model_is_not_saved(tmp_path):
    model = attnkit_model(build("gpt_oss"), experts="mxfp4")
    modules(model, "GptOssExperts")[1].attnkit_group = object()
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts is shared among processes, accepted: whole"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_quantised_otherwise_too_is_not_saved(tmp_path):
    model = build("gpt_oss")
    config = type("Config", (), {"quant_method": "torchao"})()
    model.hf_quantizer = type("Quantizer", (), {"quantization_config": config})()
    attnkit_model(model, experts="mxfp4")
    with pytest.raises(
        UnsupportedError, match="GptOssForCausalLM is quantised by torchao, too, accepted: packed experts"
    ):
        model.save_pretrained(tmp_path)


def test_a_checkpoint_of_some_layers_is_refused(tmp_path):
    """The others would be left as memory was, with a line in a report."""
    attnkit_model(build("gpt_oss"), experts="mxfp4").save_pretrained(tmp_path)
    state = {
        name: t for name, t in saved(tmp_path).items() if not name.startswith("model.layers.1.mlp.experts.gate_up")
    }
    transformers.modeling_utils.safe_save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedError, match="gate_up_proj_blocks of 1 layers, accepted: of all 2 with experts in Gpt"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_no_file_is_named_that_is_no_safetensors():
    assert saving.names_in(None) is None and saving.names_in(["pytorch_model.bin"]) is None
