"""Whole models of transformers on the kernels of Hopper, in the simulator: a forward pass of each."""

from __future__ import annotations

import pytest

import torch_attnkit
from tests.peers.tiny_models import build, frozen, tokens, with_our_routers
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4

# Sizes that the kernels have, and the families of kernels that a pass takes, as they stand in the names of launches.
MODELS = {
    "deepseek_v4": (
        dict(head_dim=128, index_head_dim=64),
        {"cache", "sparse", "indexer", "topk", "routing", "batched_gemm", "grouped_gemm"},
    ),
    "gpt_oss": (dict(head_dim=64), {"prefill", "routing", "grouped_gemm"}),
}  # fmt: skip


def built(family: str):
    """In bfloat16, with weights of experts that MXFP4 holds."""
    model = build(family, **MODELS[family][0]).bfloat16()
    round_experts_to_fp4(model, "mxfp4")
    return model


@pytest.mark.simulator
@pytest.mark.proof
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", MODELS)
def test_a_model_on_the_kernels_is_as_close_to_float64_as_eager(family):
    ptx = pytest.importorskip("torch_attnkit.sim.ptx", reason="needs the PTX simulator's extension")
    ids = tokens(2, 21)
    eager, exact = (frozen(with_our_routers(m)) for m in (built(family), built(family).double()))
    ours = frozen(attnkit_model(built(family), experts="mxfp4"))
    with torch_attnkit.simulate("sm90"), ptx.counting() as launches:
        got = ours(ids).logits
    names = "".join(launch.kernel for launch in launches)
    assert all(f"kernels{name}" in names for name in MODELS[family][1])
    errors = [float((logits.double() - exact(ids).logits).abs().mean()) for logits in (eager(ids).logits, got)]
    assert errors[1] <= 1.25 * errors[0]
