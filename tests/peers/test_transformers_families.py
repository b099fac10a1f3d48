"""What attnkit_model does to families besides those of tiny_models.py: their experts, and DeepSeek-V3's attention."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import torch_attnkit
from tests.peers.families import AGREE, CASES, build
from tests.peers.tiny_models import modules, tokens
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4


def _generate(model, ids, mask):
    """Tokens (B, T + 4) and the logits of four steps (B, 4, V)."""
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=4, output_logits=True, return_dict_in_generate=True
    )
    return out.sequences, torch.stack(out.logits, 1)


def test_deepseek_v3_decodes_over_its_latents_as_eager_does(monkeypatch):
    """What the cache holds is expanded for prompts alone."""
    eager, ours = (build("DeepseekV3ForCausalLM", "eager") for _ in range(2))
    attnkit_model(ours)
    assert ours.attnkit_swapped == {"DeepseekV3Attention": 2}
    for case, ask in CASES.items():
        theirs, got = ask(eager), ask(ours)
        assert float((theirs - got).abs().max()) <= AGREE * float(theirs.abs().max()), case
    ids, filled, expanded = tokens(2, 9), DynamicCache(config=ours.config), []
    expand = DeepseekV3Attention.expand_kv
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda *args: expanded.append(args) or expand(*args))
    ours(ids[:, :8], past_key_values=filled)
    assert len(expanded) == 2
    ours(ids[:, 8:], past_key_values=filled)
    assert len(expanded) == 2, "a decode step expanded its cache"


def test_deepseek_v3_expands_where_decode_has_no_row_or_the_projection_is_no_plain_one():
    module = modules(attnkit_model(build("DeepseekV3ForCausalLM", "eager")), "DeepseekV3Attention")[0]
    cpu = torch.device("cpu")
    assert module._absorbs(cpu, 576, 512) and module._absorbs(cpu, 288, 256)
    for target in ("sm90", "sm100", "metal"):
        with torch_attnkit.simulate(target):
            assert module._absorbs(cpu, 576, 512)
            assert not module._absorbs(cpu, 288, 256)
    module.kv_b_proj.register_forward_hook(lambda *_: None)
    assert not module._absorbs(cpu, 576, 512)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    "family", ["Mixtral", "Qwen3Moe", "Glm4Moe", "MiniMax", "MiniMaxM2", "MiniMaxM3VL", "DeepseekV3"]
)
def test_experts_of_other_families_generate_what_rounded_ones_do(family, format):
    rounded, ours = (build(f"{family}ForCausalLM", "eager") for _ in range(2))
    round_experts_to_fp4(rounded, format)
    held = len(modules(ours, "Experts"))
    attnkit_model(ours, experts=format)
    assert held == next(n for name, n in ours.attnkit_swapped.items() if name.endswith("Experts"))
    assert all(not list(m.parameters()) for m in modules(ours, "Experts"))
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    theirs = _generate(rounded, ids, mask)
    with torch_attnkit.record() as recorded:
        got = _generate(ours, ids, mask)
    assert torch.equal(theirs[0], got[0])
    assert float((theirs[1] - got[1]).abs().max()) <= AGREE * float(theirs[1].abs().max())
    assert "fp4_moe" in {op for op, _ in recorded.calls}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NemotronHForCausalLM", r"\(NemotronHExperts\): has_gate is False, accepted: True; leave experts=None"),
        (
            "Inkling2ForCausalLM",
            r"Inkling2Experts\._apply_gate multiplies gate and up, accepted: silu\(gate\) \* up .*=None",
        ),
    ],
)
def test_experts_that_fp4_moe_has_not_are_refused(name, message):
    model = build(name, "eager")
    with pytest.raises(UnsupportedError, match=message):
        attnkit_model(model, experts="mxfp4")
    assert model.config._attn_implementation == "eager"
