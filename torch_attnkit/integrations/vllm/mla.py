"""vLLM's classes of an attention backend for layers with multi-head latent attention (DeepSeek-V3, Kimi-K2).

vLLM splits a step: requests of one token, or of equally many drafts, are decoded over latents with absorbed queries
(``forward_mqa``, ours); the others become heads with keys and values of their own, which a prefill backend attends, the
step's tokens and chunks of their cached context apart (``forward_mha``, vLLM's, with our prefill backend). Only vLLM
imports this module, by way of ``choice.Backend``.

Raises ImportError where vLLM lacks what the module is written against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from torch_attnkit.core import UnsupportedError

from . import interfaces, steps

if lacking := list(interfaces.missing(interfaces.MLA)):
    raise ImportError(f"vLLM lacks what attnkit's MLA is written against: {'; '.join(lacking)}")

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLADims,
    QueryLenSupport,
    get_mla_dims,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from .backend import AsksTheTable, cache_dtype, target

_FEWER_BITS = f"with queries of 16 bits {steps.SINGLE} takes no latents of 8 bits"


class LatentBackend(AsksTheTable, MLACommonBackend):
    """The backend of latent attention."""

    @staticmethod
    def get_impl_cls() -> type[LatentImpl]:
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[LatentStepBuilder]:
        return LatentStepBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # the table knows

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # rows are counted by lengths that the host knows

    @classmethod
    def varies(cls) -> str | None:
        return (
            "vLLM packs the cached context of all prompts into chunks of one size, and decodes latents another way than"
            " prompts; accepted: 0, or --attention-backend FLASH_ATTN_MLA, whose word on it is its own"
        )

    @classmethod
    def refusal(cls, config: dict[str, Any]) -> str | None:
        known = get_current_vllm_config_or_none()
        if known is not None and known.model_config is not None:
            dims = get_mla_dims(known.model_config)
        else:
            dims = MLADims(None, config["head_size"] - 64, 128, 64, 128)  # DeepSeek-V3's, but for the latent
        # vLLM does not say how many heads; the rows take any.
        layer = layer_of(dims, 8, None, config["dtype"], config["kv_cache_dtype"], config["block_size"] or 16)
        return steps.refusal_of_latents(layer, target(), prompts=known is None or ours(known))


@dataclass
class Decode(MLACommonDecodeMetadata):
    """The decodes of a step, ``each`` tokens a request."""

    each: int = 1

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Table and lengths with a row a token: made by a step's first layer, within a CUDA graph where there is
        one."""
        return steps.token_rows(self.block_table, self.seq_lens, self.each)


class LatentStepBuilder(MLACommonMetadataBuilder[MLACommonMetadata[Decode]]):
    """Makes the step of a cache group.

    Steps in which every request has one token, or one and its drafts, may lie in a CUDA graph as a whole: decode reads
    tables and lengths on the device, from memory of vLLM's that stays where it is.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    _prefill_backend: MLAPrefillBackend

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if ours(vllm_config):
            theirs = self._prefill_backend
            self._prefill_backend = Prompts(
                theirs.num_heads, theirs.scale, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim,
                theirs.v_head_dim, vllm_config,
            )  # fmt: skip

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> Decode:
        lengths = query_start_loc_cpu.diff()
        each, rest = divmod(num_decode_tokens, lengths.shape[0])
        if rest or not bool(((lengths == each) | (lengths == 0)).all()):
            raise UnsupportedError(
                f"attnkit for vLLM: {num_decode_tokens} tokens are to be decoded of requests with {lengths.tolist()},"
                " accepted: equally many of each"
            )
        return Decode(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, each)


class LatentImpl(MLACommonImpl[MLACommonMetadata[Decode]]):
    """The attention of one layer."""

    can_return_lse_for_decode = True  # natural, which vLLM takes ours for by ``lse_base_on_e``
    supports_dcp = True
    supports_pcp = False

    # vLLM calls it by name.
    def __init__(self, **given: Any) -> None:
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap", "topk_indices_buffer", "indexer"):
            if given.get(name) not in (None, False):
                raise UnsupportedError(f"attnkit for vLLM: {name} is given to an MLA layer, accepted: None")
        if given["attn_type"] != AttentionType.DECODER:
            raise UnsupportedError(f"attnkit for vLLM: attention of kind {given['attn_type']!r}, accepted: 'decoder'")
        super().__init__(**given)
        self.supports_quant_query_input = False
        config = get_current_vllm_config()
        dims = MLADims(
            self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        )
        dtype = torch.get_default_dtype()  # vLLM's way to say the model's
        page = config.cache_config.block_size or 16
        self.layer = layer_of(dims, self.num_heads, self.scale, dtype, self.kv_cache_dtype, page)
        if word := steps.refusal_of_latents(self.layer, target(), prompts=ours(config)):
            raise UnsupportedError(f"attnkit for vLLM: {word}")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False  # outputs have 16 or 32 bits

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
        kv_cache_dtype: str, k_scale: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write kv_c_normed (T, rank) and k_pe (T, 1, rope) of a step's tokens into the cache (Np, Ps, rank + rope),
        which has no pages in vLLM's profiling run."""
        if kv_cache.numel():
            steps.store_latents(kv_c_normed, k_pe, kv_cache, slot_mapping.flatten())

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[Decode],
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of absorbed queries (T, Hq, rank + rope), in one tensor or as (T, Hq, rank) and (T, Hq, rope), over
        the cache (Np, Ps, rank + rope), which has the tokens' own rows already: out (T, Hq, rank) and, for decode
        context parallelism, the LSE (T, Hq) in float32."""
        assert attn_metadata.decode is not None
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        out, lse = steps.decode_latents(self.layer, q, kv_c_and_k_pe_cache, *attn_metadata.decode.rows)
        return out, lse if self.need_to_return_lse_for_decode else None


class Prompts(MLAPrefillBackend):
    """Attention of packed prompts whose keys and values vLLM made of latents."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of the step's tokens q and k (T, H, nope + rope), v (T, H, value) among themselves: (T, H,
        value), and the LSE (H, T) in float32 if it is asked for.

        Raises:
            UnsupportedError: output_scale or out, an output in 8 or 4 bits.
        """
        if out is not None or output_scale is not None:
            raise UnsupportedError("attnkit for vLLM: output_scale is given, accepted: None (16 or 32 bits out)")
        m = self._prefill_metadata
        packed = steps.Packed(m.query_start_loc, m.query_start_loc, m.max_query_len, m.max_query_len)
        found, lse = steps.attend_packed(q, k, v, packed, scale=self.scale, causal=True)
        return (found, lse.t().contiguous()) if return_softmax_lse else found

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the requests of ``chunk``, q (T, H, nope + rope), over a part of what they have cached, k (S, H,
        nope + rope) and v (S, H, value): (T, H, value) and the LSE (H, T), which vLLM merges with those of other parts.

        Raises:
            UnsupportedError: out is given, which ``supports_out`` denies.
        """
        if out is not None:
            raise UnsupportedError("attnkit for vLLM: out is given for cached context, accepted: None")
        packed = steps.Packed(chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len)
        found, lse = steps.attend_packed(q, k, v, packed, scale=self.scale, causal=False)
        return found, lse.t().contiguous()


def ours(vllm_config: Any) -> bool:
    """Whether prompts are ours: nobody asked for another of vLLM's prefill backends."""
    return vllm_config.attention_config.mla_prefill_backend is None


def layer_of(
    dims: MLADims, heads: int, scale: float | None, dtype: torch.dtype, kv_cache_dtype: str | None, page: int
) -> steps.LatentLayer:
    """A layer of vLLM's as the ops see it. Raises UnsupportedError for a cache of 8 or 4 bits."""
    return steps.LatentLayer(
        heads, dims.kv_lora_rank, dims.qk_rope_head_dim, dims.qk_nope_head_dim, dims.v_head_dim, dtype,
        cache_dtype(kv_cache_dtype, dtype, fp8=False, why=_FEWER_BITS), page, scale,
    )  # fmt: skip
