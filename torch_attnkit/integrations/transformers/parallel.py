"""shard_model: one model over several processes, attention by heads and packed experts by expert.

Projections to heads are cut by columns and those from heads by rows, with torch.distributed.tensor.parallel; sinks and
DeepSeek-V4's groups go with their heads. Experts stay with their process and get all tokens (``ep_moe``). Everything
else is whole in every process: DeepSeek-V4's only KV head and its compressors, norms, routers, embeddings. Of a layer
two sums are sent, one after attention and one after the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from torch_attnkit.core import UnsupportedError

from . import joined
from .deepseek_v4 import AttnkitDeepseekV4Attention
from .experts import packed_format
from .joined import class_of
from .plain import holds_plain

_COLUMNS = {GptOssAttention: ("q_proj", "k_proj", "v_proj"), AttnkitDeepseekV4Attention: ("q_b_proj",)}
_ROWS = {GptOssAttention: "o_proj", AttnkitDeepseekV4Attention: "o_b_proj"}


@torch.no_grad()
def shard_model(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Keep of ``model``, which every process has whole, what one process of ``mesh`` computes. In place; returns it.

    ``model`` is a GPT-OSS or DeepSeek-V4 that attnkit_model has been given, with packed experts; ``mesh`` has one axis,
    and its size divides the heads, the KV heads of GPT-OSS, the output groups of DeepSeek-V4, and the experts. Every
    process then calls the model with the same inputs and gets the same outputs. Its state_dict is that of its part.

    Raises:
        TypeError: ``model`` is not a transformers PreTrainedModel.
        ValueError: a mesh of several axes, or sizes that it does not divide.
        UnsupportedError: a model with attention of another family, experts that are not packed, weights that are not
            there or are subclasses of tensors, or one that is cut already. Nothing is changed then.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"shard_model: model is {type(model).__name__}, accepted: a transformers PreTrainedModel")
    if mesh.ndim != 1:
        raise ValueError(f"shard_model: mesh has {mesh.ndim} axes, accepted: one; take mesh['name'] of several")
    attentions = [m for m in model.modules() if class_of(m) in _COLUMNS]
    experts: list[Any] = [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "is_concatenated")]
    _check(model, attentions, experts, mesh.size())
    for attention in attentions:
        _cut_attention(attention, mesh)
    for module in experts:
        for name, part in _parts(module):
            kept = _local(part, mesh)
            setattr(module, name, nn.Parameter(kept, part.requires_grad) if isinstance(part, nn.Parameter) else kept)
        module.attnkit_group = mesh.get_group()
    return model


def _check(model: PreTrainedModel, attentions: list[Any], experts: list[Any], parts: int) -> None:
    if not attentions or any(type(m) is DeepseekV4Attention for m in model.modules()):
        raise UnsupportedError(
            f"shard_model: {type(model).__name__}, accepted: GPT-OSS and DeepSeek-V4, after attnkit_model(model)"
        )
    if not all(packed_format(m) for m in experts):
        raise UnsupportedError("shard_model: experts are not packed, accepted: attnkit_model(model, experts='mxfp4')")
    if any(getattr(m, "attnkit_group", None) is not None or m._is_expert_parallel for m in experts):
        raise UnsupportedError("shard_model: the model is shared among processes already, accepted: a whole one")
    for name, module in model.named_modules():
        if any(module is m or module is getattr(m, "o_a_proj", None) for m in (*attentions, *experts)):
            if not holds_plain(module):
                raise UnsupportedError(
                    f"shard_model: {name} ({type(module).__name__}) holds tensors on the meta device or subclasses of"
                    " tensors, accepted: plain ones; offload or quantise after this call"
                )
    config = model.config.get_text_config()
    sizes = {"num_attention_heads": config.num_attention_heads}
    if isinstance(attentions[0], GptOssAttention):
        sizes["num_key_value_heads"] = config.num_key_value_heads
    else:
        sizes["o_groups"] = config.o_groups
    if experts:
        sizes["the number of experts"] = experts[0].gate_up_proj_packed.shape[0]
    for name, size in sizes.items():
        if size % parts:
            raise ValueError(f"shard_model: {name} is {size}, accepted for {parts} processes: a multiple of {parts}")


def _local(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This process's part of the first axis. Nothing is sent: it is here, and NCCL does not know every dtype of it."""
    return tensor.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()


def _cut_attention(attention: Any, mesh: DeviceMesh) -> None:
    kind = class_of(attention)
    plan = {name: ColwiseParallel() for name in _COLUMNS[kind]}
    parallelize_module(attention, mesh, {**plan, _ROWS[kind]: RowwiseParallel()})
    joined.drop(attention)
    attention.sinks = nn.Parameter(_local(attention.sinks, mesh), attention.sinks.requires_grad)
    if isinstance(attention, AttnkitDeepseekV4Attention):
        attention.num_heads //= mesh.size()
        grouped = attention.o_a_proj
        grouped.weight = nn.Parameter(_local(grouped.weight, mesh), grouped.weight.requires_grad)  # (G R / P, Ko)
        grouped.n_groups //= mesh.size()


def _parts(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, scales and biases of packed experts, (E, ...) each."""
    yield from list(module.named_buffers(recurse=False))
    yield from list(module.named_parameters(recurse=False))
