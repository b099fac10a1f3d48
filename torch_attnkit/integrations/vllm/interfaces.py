"""What of vLLM the plugin is written against: names in modules, fields of the metadata of a step, and arguments.

vLLM promises no stability of these. The plugin registers itself wherever all of them are there, whatever the version.
What experts need besides is imported with the first layer of experts (``experts.py``), what latent attention needs is
asked for with the first model that has it (``mla.py``).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

RAN = ("0.32",)  # minor versions in which it has run; of 0.33 the interfaces of ordinary attention are there
_LAYERS = "vllm.model_executor.layers"
_BACKEND = "vllm.v1.attention.backend"
_MLA = f"{_LAYERS}.attention.mla_attention"
_PREFILL = "vllm.v1.attention.backends.mla.prefill.base"


@dataclass(frozen=True)
class Interfaces:
    """``names``: what modules have. ``fields`` of dataclasses, and ``called``: the arguments by which vLLM calls what
    the plugin defines, or it what vLLM defines; both by module, class and method."""

    names: dict[str, str]
    fields: dict[tuple[str, str], str]
    called: dict[tuple[str, str], str]


ORDINARY = Interfaces(
    {
        "vllm.envs": "VLLM_BATCH_INVARIANT",
        "vllm.platforms": "current_platform",
        "vllm.v1.attention.backends.registry": "AttentionBackendEnum register_backend",
        _BACKEND: "AttentionBackend AttentionCGSupport AttentionImpl AttentionMetadataBuilder AttentionType"
        " CommonAttentionMetadata MultipleOf",
        "vllm.v1.kv_cache_layout": "KVCacheLayout",
        f"{_LAYERS}.quantization": "register_quantization_config",
        f"{_LAYERS}.quantization.base_config": "QuantizationConfig",
    },
    {
        (_BACKEND, "CommonAttentionMetadata"): "query_start_loc block_table_tensor seq_lens num_actual_tokens"
        " max_query_len max_seq_len causal"
    },
    {
        (_BACKEND, "AttentionImpl.forward"): "layer query key value kv_cache attn_metadata output output_scale"
        " output_block_scale",
        (_BACKEND, "AttentionMetadataBuilder.build"): "common_prefix_len common_attn_metadata fast_build",
        (_BACKEND, "AttentionMetadataBuilder.build_for_cudagraph_capture"): "common_attn_metadata",
        (_BACKEND, "AttentionMetadataBuilder.get_cudagraph_support"): "vllm_config kv_cache_spec",
    },
)
# Asked when vLLM imports the backend: these modules take seconds, which only who serves MLA should wait for.
MLA = Interfaces(
    {
        "vllm.config": "get_current_vllm_config get_current_vllm_config_or_none",
        _BACKEND: "AttentionCGSupport AttentionType MultipleOf",
        _MLA: "MLACommonBackend MLACommonDecodeMetadata MLACommonImpl MLACommonMetadata MLACommonMetadataBuilder"
        " MLACommonPrefillMetadata MLADims QueryLenSupport get_mla_dims",
        _PREFILL: "MLAPrefillBackend",
    },
    {
        (_MLA, "MLACommonDecodeMetadata"): "block_table seq_lens dcp_tot_seq_lens",
        (_MLA, "MLACommonPrefillMetadata"): "query_start_loc max_query_len chunked_context",
        (_MLA, "MLACommonPrefillMetadata.ContextChunk"): "query_start_loc cu_seq_lens max_query_len max_seq_len",
        (_MLA, "MLADims"): "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    },
    {
        (_MLA, "MLACommonImpl.forward_mqa"): "q kv_c_and_k_pe_cache attn_metadata layer",
        (_MLA, "MLACommonImpl.do_kv_cache_update"): "kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale",
        (_MLA, "MLACommonMetadataBuilder._build_decode"): "block_table_tensor seq_lens_device max_seq_len"
        " query_start_loc_cpu query_start_loc_device num_decode_tokens max_query_len dcp_tot_seq_lens_device",
        (_PREFILL, "MLAPrefillBackend.__init__"): "num_heads scale kv_lora_rank qk_nope_head_dim qk_rope_head_dim"
        " v_head_dim vllm_config",
        (_PREFILL, "MLAPrefillBackend.run_prefill_new_tokens"): "q k v return_softmax_lse out output_scale",
        (_PREFILL, "MLAPrefillBackend.run_prefill_context_chunk"): "chunk q k v out",
    },
)


def missing(wanted: Interfaces = ORDINARY) -> Iterator[str]:
    """What the installed vLLM lacks of ``wanted``, in words. Imports it."""
    modules: dict[str, Any] = {}
    for name, names in wanted.names.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            yield f"{name} ({error})"
            continue
        lacking = [n for n in names.split() if not hasattr(module, n)]
        yield from (f"{name}.{n}" for n in lacking)
        if not lacking:
            modules[name] = module
    for (home, owner), names in wanted.fields.items():
        if home in modules:
            found = {f.name for f in dataclasses.fields(attrgetter(owner)(modules[home]))}
            yield from (f"{owner}.{n}" for n in names.split() if n not in found)
    for (home, path), names in wanted.called.items():
        if home in modules:
            owner, method = path.split(".")
            function = getattr(getattr(modules[home], owner), method, None)
            arguments = list(inspect.signature(function).parameters) if function else []
            if [n for n in arguments if n not in ("self", "cls")] != names.split():
                yield f"{path}({', '.join(names.split())})"
