"""python refused.py: what our attention backend says in vLLM to what it does not take, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.selector import AttentionSelectorConfig

from torch_attnkit import UnsupportedError
from torch_attnkit.core import Target
from torch_attnkit.integrations.vllm import backend, mla

LLAMA = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=32)
DEEPSEEK = LLAMA._replace(head_size=576, use_mla=True)
# Part of the word, and what is asked for.
REFUSED = {
    "kv_cache_dtype is 'fp8_e5m2', accepted: 'auto', 'float16', 'bfloat16', 'fp8', 'fp8_e4m3'": dict(
        kv_cache_dtype="fp8_e5m2"
    ),
    "k_cache is f16": dict(kv_cache_dtype="float16"),
    "block_size not supported": dict(block_size=24),
    "MLA not supported": dict(use_mla=True),
    "attention type encoder_only not supported": dict(attn_type="encoder_only"),
    "non-causal attention not supported": dict(use_non_causal=True),
    "DCP not supported": dict(use_dcp=True),
    "VLLM_BATCH_INVARIANT is 1, but on a CPU": dict(use_batch_invariant=True),
}
# The same of layers with latent attention.
REFUSED_OF_MLA = {
    "kv_cache_dtype is 'fp8', accepted: 'auto', 'float16', 'bfloat16'": dict(kv_cache_dtype="fp8"),
    "kv_cache_dtype is 'fp8_ds_mla', accepted": dict(kv_cache_dtype="fp8_ds_mla"),
    "k_cache is f16": dict(kv_cache_dtype="float16"),
    "block_size not supported": dict(block_size=24),
    "non-MLA not supported": dict(use_mla=False),
    "sparse not supported": dict(use_sparse=True),
    "attention sinks not supported": dict(has_sink=True),
    "sliding window not supported": dict(has_sliding_window=True),
    "non-causal attention not supported": dict(use_non_causal=True),
    "PCP not supported": dict(use_pcp=True),
    "accepted: 0, or --attention-backend FLASH_ATTN_MLA": dict(use_batch_invariant=True),
    "device-cpu query lens mismatch not supported": dict(use_adaptive_verification=True),
}
FORWARD = {
    "alibi_slopes is given (ALiBi), accepted: None": dict(alibi_slopes=[0.5] * 8),
    "attention of kind 'encoder', accepted: 'decoder'": dict(attn_type="encoder"),
}

LATENTS = dict(
    num_heads=8, head_size=576, scale=0.1, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
    kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
    q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=128,
    kv_b_proj=None, indexer=None,
)  # fmt: skip
FORWARD_OF_MLA = {
    "sliding_window is given to an MLA layer, accepted: None": dict(sliding_window=128),
    "indexer is given to an MLA layer, accepted: None": dict(indexer=object()),
    "attention of kind 'encoder', accepted: 'decoder'": dict(attn_type="encoder"),
    "kv_cache_dtype is 'fp8', accepted": dict(kv_cache_dtype="fp8"),
    "D=352": dict(qk_nope_head_dim=288, qk_head_dim=352),
    "D=320": dict(kv_lora_rank=256, head_size=320),
}


def main() -> None:
    for config in (LLAMA, LLAMA._replace(has_sink=True, has_sliding_window=True)):
        assert not reasons(config), reasons(config)
    for config in (DEEPSEEK, DEEPSEEK._replace(use_dcp=True, dtype=torch.float16), DEEPSEEK._replace(block_size=None)):
        assert not reasons(config, mla.LatentBackend), reasons(config, mla.LatentBackend)
    for config, cls, refused in (
        (LLAMA, backend.AttnkitBackend, REFUSED), (DEEPSEEK, mla.LatentBackend, REFUSED_OF_MLA),
    ):  # fmt: skip
        for word, change in refused.items():
            found = reasons(config._replace(**change), cls)
            assert len(found) == 1 and word in found[0], (word, found)
    on_hopper()
    batch_invariant()
    drafts()
    for word, change in FORWARD.items():
        raises(word, lambda change=change: backend.AttnkitImpl(8, 128, 0.1, 8, **change))
    refusals = (*REFUSED, *REFUSED_OF_MLA, *FORWARD, *FORWARD_OF_MLA)
    print(f"refused, with words: {len(refusals)} configurations")


def reasons(config: AttentionSelectorConfig, cls: Any = backend.AttnkitBackend) -> list[str]:
    return cls.validate_configuration(device_capability=None, **config._asdict())


def on_hopper() -> None:
    """What a Hopper GPU's rows say of layers with latent attention, which on a CPU the definitions take."""
    own, mla.target = mla.target, lambda: Target("sm90")
    for word, change in {
        "D=320": dict(head_size=320),
        "dtype f32 not in": dict(dtype=torch.float32),
    }.items():
        (found,) = reasons(DEEPSEEK._replace(**change), mla.LatentBackend)
        assert word in found, (word, found)
    assert not reasons(DEEPSEEK, mla.LatentBackend)
    with set_current_vllm_config(VllmConfig()):
        in_bf16(lambda: mla.LatentImpl(**LATENTS))
    for word, change in FORWARD_OF_MLA.items():
        raises(word, lambda change=change: in_bf16(lambda: mla.LatentImpl(**LATENTS | change)))
    mla.target = own


def batch_invariant() -> None:
    """On a GPU ordinary attention takes it, before a layer is made and when vLLM asks once more; latent never."""
    own, backend.current_platform = backend.current_platform, SimpleNamespace(is_cpu=lambda: False, device_type="cpu")
    assert not reasons(LLAMA._replace(use_batch_invariant=True)) and backend.AttnkitBackend.supports_batch_invariance()
    backend.current_platform = own
    assert not backend.AttnkitBackend.supports_batch_invariance() and not mla.LatentBackend.supports_batch_invariance()


def drafts() -> None:
    """Requests of equally many tokens are decoded, those that pad a batch have none; others would be prompts."""
    assert (
        mla.LatentStepBuilder.query_len_support.name == mla.LatentStepBuilder._cudagraph_support.name[:7] == "UNIFORM"
    )

    def build(tokens: int, *offsets: int) -> int:
        lengths, cu = torch.ones(len(offsets) - 1), torch.tensor(offsets)
        builder = object.__new__(mla.LatentStepBuilder)
        return builder._build_decode(lengths[:, None], lengths, 9, cu, cu, tokens, 4, None).each

    assert build(3, 0, 1, 2, 3) == 1 and build(8, 0, 4, 8) == 4 and build(12, 0, 4, 8, 8) == 4
    raises("3 tokens are to be decoded of requests with [2, 1]", lambda: build(3, 0, 2, 3))
    raises("4 tokens are to be decoded of requests with [3, 1]", lambda: build(4, 0, 3, 4))


def in_bf16(make: Callable[[], object]) -> object:
    """As vLLM builds layers."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def raises(word: str, make: Callable[[], object]) -> None:
    try:
        with set_current_vllm_config(VllmConfig()):
            make()
    except UnsupportedError as error:
        assert word in str(error), (word, error)
    else:
        raise AssertionError(f"taken, and {word!r} not said")


if __name__ == "__main__":
    main()
