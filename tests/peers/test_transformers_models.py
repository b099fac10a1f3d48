"""attn_implementation="attnkit" on tiny models of many families: as eager has it, or refused with words.

What must not be is a third: a model that takes the mask for something else and is wrong without a word. The models run
in float32, as they would, and agree to AGREE of the largest number.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import torch_attnkit
from tests.peers.tiny_models import tokens
from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.transformers import attnkit_model

AGREE = 1e-5
# Of these a config gets what its class has; other names, layers and sizes keep their defaults.
_SMALL = dict(
    vocab_size=128, hidden_size=32, d_model=32, n_embd=32, embedding_size=32, embedding_dim=32, word_embed_proj_dim=32,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2, head_dim=8, d_kv=8, rotary_dim=4, intermediate_size=48, n_inner=48, d_ff=48,
    decoder_ffn_dim=48, encoder_ffn_dim=48, ffn_dim=48, num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2,
    decoder_layers=2, encoder_layers=2, num_decoder_layers=2, max_position_embeddings=64, n_positions=64,
    max_seq_len=64, max_target_positions=64, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, n_group=1, topk_group=1, kv_lora_rank=16,
    q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_n_heads=4, index_head_dim=16,
    index_topk=4, first_k_dense_replace=1, sliding_window=4, attention_window=4, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=1, type_vocab_size=2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8, layer_types=None,
)  # fmt: skip
_MLA = dict(num_key_value_heads=4)
_DECODER = dict(is_decoder=True)

# Through AttentionInterface with the mask untouched.
SERVED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {}, "MistralForCausalLM": {}, "MixtralForCausalLM": {}, "PhimoeForCausalLM": {},
    "PhiForCausalLM": {}, "Phi3ForCausalLM": {}, "Qwen2ForCausalLM": {}, "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {}, "GemmaForCausalLM": {}, "Gemma2ForCausalLM": {}, "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {}, "Starcoder2ForCausalLM": {}, "StableLmForCausalLM": {}, "GPT2LMHeadModel": {},
    "GPTBigCodeForCausalLM": {}, "GPTNeoXForCausalLM": {}, "OPTForCausalLM": {}, "BioGptForCausalLM": {},
    "CohereForCausalLM": {}, "GlmForCausalLM": {}, "GraniteForCausalLM": {}, "SmolLM3ForCausalLM": {},
    "PersimmonForCausalLM": {}, "CTRLLMHeadModel": {},
    "DeepseekV3ForCausalLM": _MLA, "GptOssForCausalLM": {}, "Qwen3NextForCausalLM": {},
    "BertLMHeadModel": _DECODER, "BertModel": {}, "RobertaModel": {}, "ElectraModel": {}, "DistilBertModel": {},
    "AlbertModel": {}, "XLMRobertaModel": {}, "ModernBertModel": {}, "BartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {}, "M2M100ForConditionalGeneration": {}, "WhisperForCausalLM": {},
}  # fmt: skip
# With arithmetic of their own: on the mask, beside it, or in classes of their own.
REFUSED: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {}, "CodeGenForCausalLM": {}, "GPTNeoXJapaneseForCausalLM": {}, "XGLMForCausalLM": {},
    "GPTJForCausalLM": {}, "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 1]], window_size=4),
    "FalconForCausalLM": {}, "MptForCausalLM": {}, "DeepseekV32ForCausalLM": _MLA, "DogeForCausalLM": {},
    "DeepseekV4ForCausalLM": dict(head_dim=16, num_key_value_heads=1), "Llama4ForCausalLM": {},
    "TrOCRForCausalLM": {}, "MPNetModel": {}, "RoFormerModel": {}, "RoFormerForCausalLM": _DECODER,
    "RemBertModel": {}, "RemBertForCausalLM": _DECODER, "MegatronBertModel": {}, "MegatronBertForCausalLM": _DECODER,
    "ConvBertModel": {}, "SqueezeBertModel": {}, "IBertModel": {}, "NystromformerModel": {}, "LongformerModel": {},
    "LayoutLMModel": {}, "T5ForConditionalGeneration": {}, "LEDForConditionalGeneration": {},
}  # fmt: skip
# With masks and attention of their own, which transformers' settings do not reach.
OWN: dict[str, dict[str, Any]] = {
    "OpenAIGPTLMHeadModel": {}, "XLNetLMHeadModel": {}, "DebertaV2Model": {}, "FunnelModel": {},
}  # fmt: skip
# Attention in front of and behind its recurrences.
_RECURRENT = {
    "RecurrentGemmaForCausalLM": dict(
        num_hidden_layers=3, block_types=["attention", "recurrent", "recurrent"], lru_width=32, attention_window_size=4
    )
}
MODELS = SERVED | REFUSED | OWN | _RECURRENT


def _config(name: str) -> Any:
    config_class = getattr(transformers, name).config_class
    plain = config_class()
    fields = {
        k: v for k, v in _SMALL.items() if k in vars(plain) and not isinstance(getattr(plain, k), (list, tuple, dict))
    }
    if vars(plain).get("layer_types"):  # both kinds where there are two
        fields["layer_types"] = (list(dict.fromkeys(plain.layer_types)) * 2)[-2:]
    return config_class(**(fields | MODELS[name]))


@torch.no_grad()
def _build(name: str, attention: str) -> Any:
    config = _config(name)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    model = getattr(transformers, name)(config).eval()
    gen = torch.Generator().manual_seed(0)
    for p in model.parameters():  # as large as what they are applied to, so that a wrong mask shows
        p.copy_(torch.randn(p.shape, generator=gen) * (0.3 if p.ndim < 2 else p.shape[-1] ** -0.5))
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
    return model


@cache
def eager(name: str) -> Any:
    return _build(name, "eager")


@cache
def ours(name: str) -> Any:
    """Only ever called inside a test of the words: some models are refused while they are built."""
    return _build(name, "attnkit")


def _padding(name: str) -> torch.Tensor:
    """(2, 12) with padding where the model may have it."""
    mask = torch.ones(2, 12, dtype=torch.long)
    if "ForCausalLM" in name or "LMHead" in name:
        mask[1, :4] = 0
    else:
        mask[1, 8:] = 0
    return mask


@torch.no_grad()
def _forward(model: Any, mask: torch.Tensor | None) -> torch.Tensor:
    kwargs = {} if mask is None else dict(attention_mask=mask)
    if model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = tokens(2, 9, seed=2)
    out = model(tokens(2, 12), **kwargs)[0]
    same_tokens = mask is not None and out.shape[:2] == mask.shape
    return out[mask.bool()] if same_tokens else out


def _generate(model: Any, mask: torch.Tensor) -> torch.Tensor:
    out = model.generate(
        tokens(2, 12), attention_mask=mask, do_sample=False, max_new_tokens=3, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(out.logits, 1)


def _same(theirs: torch.Tensor, got: torch.Tensor) -> None:
    assert theirs.shape == got.shape and bool(theirs.isfinite().all())
    assert float((theirs - got).abs().max()) <= AGREE * float(theirs.abs().max())


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", (*SERVED, *OWN))
def test_a_forward_pass_equals_eager(name, padded):
    mask = _padding(name) if padded else None
    with torch_attnkit.record() as recorded:
        got = _forward(ours(name), mask)
    _same(_forward(eager(name), mask), got)
    assert bool(recorded.calls) == (name in SERVED)


@pytest.mark.parametrize("name", [n for n in SERVED if "For" in n or "LMHead" in n])
def test_generation_behind_padding_equals_eager(name):
    """Padding of a prompt lies to its left, that of an encoder to its right."""
    mask = _padding(name)
    _same(_generate(eager(name), mask), _generate(ours(name), mask))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", REFUSED)
def test_arithmetic_of_the_models_own_is_refused_with_a_way_out(name, padded):
    mask = _padding(name) if padded else None
    assert bool(_forward(eager(name), mask).isfinite().all())
    with pytest.raises(UnsupportedError, match=r"accepted: .*attn_implementation='eager'|call attnkit_model\(model\)"):
        _forward(ours(name), mask)


@pytest.mark.parametrize("name", ["BloomForCausalLM", "CodeGenForCausalLM", "MptForCausalLM", "XGLMForCausalLM"])
def test_generation_is_refused_too(name):
    """Also behind a static cache, for which generate() makes the mask itself."""
    for cache_implementation in ("dynamic", "static"):
        with pytest.raises(UnsupportedError, match=r"takes the mask for a tensor"):
            ours(name).generate(tokens(2, 12), max_new_tokens=2, cache_implementation=cache_implementation)


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "GPTNeoForCausalLM", "FalconForCausalLM"])
def test_a_model_with_attention_classes_of_its_own_is_named(name):
    with pytest.raises(UnsupportedError, match=r"(gptj|gpt_neo|falcon) chooses from .* of its own.*'sdpa'"):
        ours(name)
    with pytest.raises(UnsupportedError, match=f"{name} does not choose its attention through AttentionInterface"):
        attnkit_model(_build(name, "eager"))


def test_a_recurrence_that_reads_what_padding_was_given_is_refused_behind_left_padding():
    """Right padding, and no padding, is as eager has it."""
    name = "RecurrentGemmaForCausalLM"
    right = _padding("BertModel")
    for mask in (None, torch.ones(2, 12), right):
        _same(_forward(eager(name), mask), _forward(ours(name), mask))
    with pytest.raises(UnsupportedError, match=r"hides the first tokens .* recurrent_gemma read, accepted: .*'eager'"):
        _forward(ours(name), _padding(name))


def test_the_lists_are_long_enough_to_mean_something():
    assert len(SERVED) >= 40 and len(REFUSED) >= 25 and not SERVED.keys() & REFUSED.keys()
