"""vLLM's three classes of an attention backend: what it supports, the batch of a step, and a layer's attention.

Only vLLM imports this module, by the path that ``register`` gave it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from torch_attnkit.core import Target, UnsupportedError
from torch_attnkit.core.target import target_of

from . import steps

# What the table has no word for, by the name of the argument of an attention layer. What it has words for, it refuses.
_FOREIGN = {"alibi_slopes": "ALiBi", "use_alibi_sqrt": "ALiBi", "chunk_lookback": "chunks that look back"}


class AsksTheTable:
    """What both kinds of backend tell vLLM before it takes one: the op table answers, by ``refusal``."""

    # The table says which of these it takes on this device.
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = []  # all, as far as vLLM judges: ours have a word about others

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def varies(cls) -> str | None:
        """Why bits of a request depend on what else is in the batch, whatever plans look at; None where they do not."""
        raise NotImplementedError

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return cls.varies() is None

    @classmethod
    def validate_configuration(cls, **config: Any) -> list[str]:
        """Reasons against the configuration (the fields of vLLM's AttentionSelectorConfig and the device's compute
        capability): those that hold for every device, and what the table says of this one. No reason: it runs."""
        if config.get("use_batch_invariant") and (word := cls.varies()):
            return [f"attnkit for vLLM: VLLM_BATCH_INVARIANT is 1, but {word}"]
        reasons: list[str] = super().validate_configuration(**config)  # type: ignore[misc]
        if reasons:
            return reasons
        try:
            word = cls.refusal(config)
        except UnsupportedError as error:
            word = str(error)
        return [word] if word else []

    @classmethod
    def refusal(cls, config: dict[str, Any]) -> str | None:
        """What the table has against it, or nothing. Raises UnsupportedError for words that the table has not."""
        raise NotImplementedError


class AttnkitBackend(AsksTheTable, AttentionBackend):
    """The backend of ordinary attention."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[AttnkitImpl]:
        return AttnkitImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def varies(cls) -> str | None:
        if current_platform.is_cpu():
            return "on a CPU bits depend on how a prompt is cut into chunks; accepted: 0, or an NVIDIA GPU"
        return None

    @classmethod
    def refusal(cls, config: dict[str, Any]) -> str | None:
        layer = steps.Layer(
            heads=8,  # vLLM does not say how many; the rows take any
            kv_heads=1,
            dim=config["head_size"],
            dtype=config["dtype"],
            cache_dtype=cache_dtype(config["kv_cache_dtype"], config["dtype"], fp8=True),
            page=config["block_size"] or 16,
            window=1 if config.get("has_sliding_window") else -1,
            sink=bool(config["has_sink"]),
        )
        return steps.refusal(steps.MIXED, layer, target())


class StepBuilder(AttentionMetadataBuilder[steps.Step]):
    """Makes the step of a cache group.

    Steps whose requests have equally many tokens, one or one and its drafts, may lie in a CUDA graph as a whole: the
    ops read offsets, lengths, tables and slots on the device, from memory of vLLM's that stays where it is, and plans
    are made for the longest sequences of the model. In other steps vLLM's piecewise graphs stop before attention.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.longest = int(vllm_config.model_config.max_model_len)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> steps.Step:
        m = common_attn_metadata
        given = (m.query_start_loc, m.block_table_tensor, m.seq_lens)
        return self.build(0, m).to_capture(given, self.longest)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> steps.Step:
        m = common_attn_metadata
        if m.causal is not True:
            raise UnsupportedError("attnkit for vLLM: a step is not causal, accepted: causal attention of a decoder")
        return steps.Step.of(
            m.num_actual_tokens, m.query_start_loc, m.block_table_tensor, m.seq_lens, m.max_query_len, m.max_seq_len
        )


class AttnkitImpl(AttentionImpl[steps.Step]):
    """The attention of one layer."""

    # vLLM calls it by position, with these names.
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        from vllm.config import get_current_vllm_config

        self.sinks: torch.Tensor | None = more.pop("sinks", None)
        for name, value in {"alibi_slopes": alibi_slopes, **more}.items():
            if value not in (None, False, -1):
                what = _FOREIGN.get(name, "not known to it")
                raise UnsupportedError(f"attnkit for vLLM: {name} is given ({what}), accepted: None")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attnkit for vLLM: attention of kind {attn_type!r}, accepted: 'decoder'")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        dtype = torch.get_default_dtype()  # vLLM's way to say the model's
        self.layer = steps.Layer(
            num_heads, self.num_kv_heads, head_size, dtype, cache_dtype(kv_cache_dtype, dtype, fp8=True),
            page=get_current_vllm_config().cache_config.block_size or 16,
            scale=self.scale,
            window=-1 if sliding_window is None else sliding_window,
            softcap=logits_soft_cap or 0.0,
            sink=self.sinks is not None,
        )  # fmt: skip
        where = target()
        if word := steps.refusal(steps.MIXED, self.layer, where):
            raise UnsupportedError(f"attnkit for vLLM: {word}")
        self.supports_decode = steps.supports_decode(self.layer, where)
        self.sink: torch.Tensor | None = None
        self.made: steps.Scales | None = None
        self.requests = int(get_current_vllm_config().scheduler_config.max_num_seqs)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self.sink = self.sinks.detach().float()  # (Hq,)

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write key and value (T, Hkv, D) of a step's tokens into the cache."""
        steps.store(key, value, kv_cache, slot_mapping, self.scales(layer))

    def scales(self, layer: Any) -> steps.Scales | None:
        """Those of a cache in E4M3: vLLM's, of the checkpoint or ones. Its profiling run makes them, before any CUDA
        graph is captured."""
        if self.layer.fp8 and self.made is None:
            self.made = steps.Scales.of((layer._k_scale, layer._v_scale), self.requests, self.num_kv_heads)
        return self.made

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: steps.Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query (T, Hq, D) over kv_cache (Np, Hkv, Ps, 2D), which has key and value already, into output
        (T, Hq, D). Tokens that pad the batch keep what output held; without metadata, in vLLM's profiling run, zeros.

        Raises:
            UnsupportedError: output_scale or output_block_scale, an output in 8 or 4 bits.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("attnkit for vLLM: output_scale is given, accepted: None (16 or 32 bits out)")
        scales = self.scales(layer)
        if attn_metadata is None:
            return output.zero_()
        if self.sink is None:  # weights were not loaded by a loader that tells of it
            self.process_weights_after_loading(query.dtype)
        n = attn_metadata.tokens
        steps.attend(
            self.layer, attn_metadata, query[:n], kv_cache, self.sink, output[:n], decode=self.supports_decode,
            scales=scales,
        )  # fmt: skip
        return output


def target() -> Target:
    """What vLLM runs on. Raises UnsupportedError for a device without kernels."""
    return target_of(torch.device(current_platform.device_type))


def cache_dtype(kv_cache_dtype: str | None, dtype: torch.dtype, *, fp8: bool, why: str = "") -> torch.dtype:
    """The dtype that vLLM's word for a cache stands for beside a model of ``dtype``.

    Raises:
        UnsupportedError: a word for 4 bits, E5M2 or, without ``fp8``, E4M3, and ``why``.
    """
    dtypes = {None: dtype, "auto": dtype, "float16": torch.float16, "bfloat16": torch.bfloat16}
    dtypes |= {"fp8": steps.E4M3, "fp8_e4m3": steps.E4M3} if fp8 else {}
    if kv_cache_dtype not in dtypes:
        accepted = ", ".join(repr(name) for name in dtypes if name is not None)
        raise UnsupportedError(
            f"attnkit for vLLM: kv_cache_dtype is {kv_cache_dtype!r}, accepted: {accepted}{why and f'; {why}'}"
        )
    return dtypes[kv_cache_dtype]
