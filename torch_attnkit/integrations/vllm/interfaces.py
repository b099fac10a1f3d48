"""What of vLLM the plugin is written against: names in modules, fields of the metadata of a step, and arguments.

vLLM promises no stability of these. The plugin registers itself wherever all of them are there, whatever the version.
What experts need besides is imported with the first layer of experts (``experts.py``).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

RAN = ("0.32",)  # minor versions in which it has run; of 0.33 the interfaces are there
_LAYERS = "vllm.model_executor.layers"
NAMES = {
    "vllm.platforms": "current_platform",
    "vllm.v1.attention.backends.registry": "AttentionBackendEnum register_backend",
    "vllm.v1.attention.backend": "AttentionBackend AttentionCGSupport AttentionImpl AttentionMetadataBuilder"
    " AttentionType CommonAttentionMetadata MultipleOf",
    "vllm.v1.kv_cache_layout": "KVCacheLayout",
    f"{_LAYERS}.quantization": "register_quantization_config",
    f"{_LAYERS}.quantization.base_config": "QuantizationConfig",
}
# Fields of a step's metadata, and the arguments by which vLLM calls what the backend defines.
_FIELDS = "query_start_loc block_table_tensor seq_lens num_actual_tokens max_query_len max_seq_len causal"
_CALLED = {
    "AttentionImpl.forward": "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    "AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    "AttentionMetadataBuilder.build_for_cudagraph_capture": "common_attn_metadata",
    "AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
}


def missing() -> Iterator[str]:
    """What the installed vLLM lacks, in words. Imports it."""
    found: dict[str, Any] = {}
    for name, wanted in NAMES.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            yield f"{name} ({error})"
            continue
        lacking = [n for n in wanted.split() if not hasattr(module, n)]
        yield from (f"{name}.{n}" for n in lacking)
        if name == "vllm.v1.attention.backend" and not lacking:
            found = vars(module)
    if found:
        fields = {f.name for f in dataclasses.fields(found["CommonAttentionMetadata"])}
        yield from (f"CommonAttentionMetadata.{n}" for n in _FIELDS.split() if n not in fields)
        for path, wanted in _CALLED.items():
            owner, method = path.split(".")
            function = getattr(found[owner], method, None)
            names = list(inspect.signature(function).parameters) if function else []
            if [n for n in names if n not in ("self", "cls")] != wanted.split():
                yield f"{path}({', '.join(wanted.split())})"
