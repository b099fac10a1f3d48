"""python refused.py: what our attention backend says in vLLM to what it does not take, before a model is loaded."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.selector import AttentionSelectorConfig

from torch_attnkit import UnsupportedError
from torch_attnkit.integrations.vllm import backend

LLAMA = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=32)
# Part of the word, and what is asked for.
REFUSED = {
    "kv_cache_dtype is 'fp8', accepted: 'auto', 'float16', 'bfloat16'": dict(kv_cache_dtype="fp8"),
    "k_cache is f16": dict(kv_cache_dtype="float16"),
    "block_size not supported": dict(block_size=24),
    "MLA not supported": dict(use_mla=True),
    "attention type encoder_only not supported": dict(attn_type="encoder_only"),
    "non-causal attention not supported": dict(use_non_causal=True),
    "DCP not supported": dict(use_dcp=True),
}
FORWARD = {
    "alibi_slopes is given (ALiBi), accepted: None": dict(alibi_slopes=[0.5] * 8),
    "attention of kind 'encoder', accepted: 'decoder'": dict(attn_type="encoder"),
}


def main() -> None:
    for config in (LLAMA, LLAMA._replace(has_sink=True, has_sliding_window=True)):
        assert not reasons(config), reasons(config)
    for word, change in REFUSED.items():
        found = reasons(LLAMA._replace(**change))
        assert len(found) == 1 and word in found[0], (word, found)
    for word, change in FORWARD.items():
        try:
            with set_current_vllm_config(VllmConfig()):
                backend.AttnkitImpl(8, 128, 0.1, 8, **change)
        except UnsupportedError as error:
            assert word in str(error), (word, error)
        else:
            raise AssertionError(f"{change} was taken")
    print(f"refused, with words: {len(REFUSED) + len(FORWARD)} configurations")


def reasons(config: AttentionSelectorConfig) -> list[str]:
    return backend.AttnkitBackend.validate_configuration(device_capability=None, **config._asdict())


if __name__ == "__main__":
    main()
