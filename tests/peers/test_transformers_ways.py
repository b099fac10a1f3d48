"""Ways back from attnkit_model, and refusals that name a way which works: what they say is done here."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, DeepseekVLHybridConfig, DeepseekVLHybridForConditionalGeneration

import torch_attnkit
from tests.peers import families
from tests.peers.tiny_models import FAMILIES, SIMULATED, build, frozen, modules, tokens
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model


@pytest.mark.parametrize("family", FAMILIES | SIMULATED)
def test_a_restored_model_is_the_one_it_was(family):
    model = frozen(build(family, "eager"))
    ids = tokens(2, 12)
    before, classes, names = model(ids)[0], [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    assert attnkit_model(attnkit_model(model)).attnkit_restore() is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == names
    with torch_attnkit.record() as recorded:
        assert torch.equal(model(ids)[0], before)
    assert model.config._attn_implementation == "eager" and not recorded.calls
    with pytest.raises(ValueError, match=r"attnkit_restore: \w+ is as it was, accepted: one that attnkit_model has"):
        model.attnkit_restore()


def test_a_copy_is_restored_by_itself():
    model = attnkit_model(build("deepseek_v4"))
    copy.deepcopy(model).attnkit_restore()
    assert len(modules(model, "AttnkitDeepseekV4Attention")) == 4 and model.config._attn_implementation == "attnkit"


def test_packed_models_are_not_restored():
    model = attnkit_model(build("gpt_oss"), experts="mxfp4")
    classes = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedError, match="packed the experts to mxfp4 and deleted their weights, accepted: exp"):
        model.attnkit_restore()
    assert [type(m) for m in model.modules()] == classes and model.config._attn_implementation == "attnkit"


def test_a_dispatched_model_is_restored_once_its_hooks_are_off():
    model = attnkit_model(build("gpt_oss"))
    router = modules(model, "GptOssTopKRouter")[0]
    router.forward = router.forward
    with pytest.raises(UnsupportedError, match="a AttnkitGptOssTopKRouter has a forward of its own"):
        model.attnkit_restore()
    del router.forward
    assert not modules(model.attnkit_restore(), "Attnkit")


def test_deepseek_v4_runs_under_eager_attention_after_attnkit_model():
    """Where its attention refuses a call it says so."""
    theirs, ours = (frozen(build("deepseek_v4")) for _ in range(2))
    attnkit_model(ours)
    packed = dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)
    with pytest.raises(UnsupportedError, match=r"choose attn_implementation='eager'$"):
        ours(tokens(1, 8), **packed)
    ours.set_attn_implementation("eager")
    with torch_attnkit.record() as recorded:
        got = ours(tokens(1, 8), **packed).logits
    want = theirs(tokens(1, 8), **packed).logits
    assert float((want - got).abs().max()) <= families.AGREE * float(want.abs().max())
    assert {op for op, _ in recorded.calls} == {"route_hash", "route_sqrt_softplus"}


def test_experts_that_cannot_be_packed_are_told_another_way():
    model = families.build("NemotronHForCausalLM", "eager")
    model.set_experts_implementation("attnkit")
    with pytest.raises(UnsupportedError, match=r"accepted: weights packed to FP4; model.set_experts_implementation"):
        families.forward(model, None)
    model.set_experts_implementation("eager")
    assert bool(families.forward(model, None).isfinite().all())


# Attention classes that are looked up in a dictionary.


def _hybrid() -> Any:
    image = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=16)
    return DeepseekVLHybridConfig(
        text_config=dict(
            model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2,
        ),
        vision_config=image | dict(model_type="siglip_vision_model", intermediate_size=32, image_size=32),
        high_res_vision_config=image | dict(
            model_type="sam_vision_model", output_channels=8, image_size=64, mlp_dim=32, global_attn_indexes=[0],
            window_size=2,
        ),
        image_token_id=5,
    )  # fmt: skip


@torch.no_grad()
def test_an_image_encoder_with_classes_of_its_own_is_refused_and_the_language_model_runs_without_it():
    message = r"sam chooses from attention classes of its own, .* attn_implementation={'text_config': 'attnkit'}"
    with pytest.raises(UnsupportedError, match=message):
        DeepseekVLHybridForConditionalGeneration._from_config(_hybrid(), attn_implementation="attnkit")
    own = {"text_config": "attnkit"}
    built = DeepseekVLHybridForConditionalGeneration._from_config(_hybrid(), attn_implementation=own)
    late = DeepseekVLHybridForConditionalGeneration._from_config(_hybrid(), attn_implementation="sdpa")
    late.set_attn_implementation(own)
    whole = DeepseekVLHybridForConditionalGeneration._from_config(_hybrid(), attn_implementation="sdpa")
    for model in (built, late, attnkit_model(whole)):
        with torch_attnkit.record() as recorded:
            assert bool(model.eval()(tokens(1, 8) % 50 + 6).logits.isfinite().all())
        assert {op for op, _ in recorded.calls} == {"flash_attention"}
        assert [type(m).__name__ for m in modules(model, "SamVisionAttention")] == ["SamVisionSdpaAttention"]
    parts = [whole.attnkit_restore().config, *(getattr(whole.config, name) for name in whole.config.sub_configs)]
    assert [part._attn_implementation for part in parts] == ["sdpa"] * 4


@pytest.mark.parametrize("name", ["Data2VecVisionConfig", "SamConfig", "SamHQConfig"])
def test_an_image_encoder_alone_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"chooses from attention classes of its own, .*'eager'$"):
        AutoModel.from_config(getattr(transformers, name)(), attn_implementation="attnkit")


def test_every_dictionary_of_attention_classes_in_transformers_has_an_entry():
    root, found = Path(transformers.__file__).parent / "models", []
    for path in root.glob("*/modeling_*.py"):
        for name in re.findall(r"\b([A-Z0-9_]+_CLASSES)\[[\w.]*attn_implementation\]", path.read_text("utf-8")):
            found.append(name)
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            with pytest.raises(UnsupportedError, match="accepted: models whose attention goes through it; choose"):
                getattr(module, name)["attnkit"]()
    assert len(found) >= 11
