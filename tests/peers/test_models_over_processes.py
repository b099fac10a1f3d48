"""Tiny DeepSeek-V4 and GPT-OSS over two processes, attention by heads and experts by expert: the tokens of one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import processes
from tests.peers.tiny_models import build, frozen, tokens
from torch_attnkit import UnsupportedError

NEW = 12
WORLD = 2
AGREE = 1e-4  # of logits, beside the largest: float32, whose sums come in another order


def generated(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens (2, 8 + NEW) behind a prompt of 8, and logits (2, 8, vocabulary) of the prompt."""
    prompt = tokens(2, 8)
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=NEW, do_sample=False), model(prompt).logits


class SentDtypes(TorchDispatchMode):
    """The dtypes of what collectives in this block move."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.dtypes |= {t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def work(rank: int, family: str, format: str) -> dict[str, object]:
    from torch.distributed.tensor import init_device_mesh

    from torch_attnkit.integrations.transformers import attnkit_model, shard_model

    torch.manual_seed(0)
    model = attnkit_model(frozen(build(family)), experts=format)
    alone = generated(model)
    whole = sum(t.numel() for t in model.state_dict().values())
    mesh = init_device_mesh("cpu", (WORLD,))
    with SentDtypes() as sent:
        shard_model(model, mesh)
    with pytest.raises(UnsupportedError, match="shared among processes already"):
        shard_model(model, mesh)
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t
    kept = sum(local(t).numel() for t in model.state_dict().values())
    return dict(alone=alone, shared=generated(model), kept=kept / whole, sent=sent.dtypes)


def refused(rank: int) -> None:
    from torch.distributed.tensor import init_device_mesh

    from torch_attnkit.integrations.transformers import attnkit_model, shard_model

    mesh = init_device_mesh("cpu", (WORLD,))
    offloaded = attnkit_model(build("gpt_oss"), experts="mxfp4")
    offloaded.model.layers[1].self_attn.to("meta")
    for model, error, message in (
        (offloaded, UnsupportedError, r"layers\.1\.self_attn \(GptOssAttention\) holds tensors on the meta device"),
        (build("llama"), UnsupportedError, "shard_model: LlamaForCausalLM, accepted: GPT-OSS and DeepSeek-V4"),
        (build("deepseek_v4"), UnsupportedError, "shard_model: DeepseekV4ForCausalLM, accepted"),
        (attnkit_model(build("gpt_oss")), UnsupportedError, "experts are not packed"),
        (attnkit_model(build("gpt_oss", num_local_experts=5), experts="mxfp4"), ValueError, "experts is 5, accepted"),
        (torch.nn.Linear(1, 1), TypeError, "model is Linear"),
    ):
        with pytest.raises(error, match=message):
            shard_model(model, mesh)


@pytest.mark.parametrize(
    ("family", "format"),
    [("gpt_oss", "mxfp4"), ("deepseek_v4", "nvfp4"), ("gpt_oss", "nvfp4"), ("deepseek_v4", "mxfp4")],
)
@pytest.mark.proof
def test_two_processes_generate_the_tokens_of_one(family: str, format: str):
    results = processes.run(WORLD, work, family, format)
    for found in results:
        (alone, logits), (shared, logits_shared) = found["alone"], found["shared"]
        assert torch.equal(alone, shared)
        assert (logits - logits_shared).abs().max() <= AGREE * logits.abs().max()
        assert len(alone[:, 8:].unique()) > 3, "a model that says one thing shows nothing"
        assert found["kept"] < 0.85
        assert all(dtype.itemsize > 1 for dtype in found["sent"]), "NCCL does not know every dtype of scales"
    assert torch.equal(results[0]["shared"][0], results[1]["shared"][0])


@pytest.mark.proof
def test_what_cannot_be_shared_is_refused():
    processes.run(WORLD, refused)
