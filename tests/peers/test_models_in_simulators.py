"""Whole models of transformers in the simulators: a prompt and decoded tokens, every call of ours on a kernel.

In float16, and behind prompts of which no token is nearly a tie, so that equal tokens are owed. In bfloat16 eager
attention itself chooses another token than float64 behind every third prompt.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import StaticCache

import torch_attnkit
from tests.peers.tiny_models import build, frozen, tokens, with_our_routers
from torch_attnkit import Target, UnsupportedError
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import SIMULATED
from torch_attnkit.integrations.transformers import attnkit_model, round_experts_to_fp4
from torch_attnkit.parity.guard import guarded_outputs
from torch_attnkit.parity.runners import Runner, simulators

pytestmark = [pytest.mark.simulator, pytest.mark.filterwarnings("default"), pytest.mark.seconds(600)]
ROWS, LENGTH, NEW = 2, 21, 4  # longer than the windows, with more compressed entries than an indexer chooses
SCHEDULE = 1  # of the PTX simulator: hostile


@dataclass(frozen=True)
class Model:
    """What is built and run, and how often each op is called: by attnkit_model, for the prompt, for a decoded token.

    The first token comes with the prompt.
    """

    family: str
    sizes: dict[str, Any]  # of the config: heads that every architecture has a row for, limits that are reached
    experts: str
    prompt: int  # seed of its token ids
    packing: dict[str, int]
    prefill: dict[str, int]
    step: dict[str, int]
    padding: int = 0  # tokens to the left of the last row's prompt
    options: dict[str, Any] = field(default_factory=dict)  # of generate
    nvidia: dict[str, int] = field(default_factory=dict)  # for a decoded token, where rows are NVIDIA's alone

    def calls(self, arch: str) -> Counter[str]:
        """On ``arch``."""
        step = self.step if arch == "metal" else self.step | self.nvidia
        steps = {op: n * (NEW - 1) for op, n in step.items()}
        return Counter(self.packing) + Counter(self.prefill) + Counter(steps)


_GPT_OSS = {"route_softmax": 2, "fp4_moe": 2}
_QWEN = {"gated_rmsnorm": 1, "route_softmax": 2, "fp4_moe": 2}
_V4 = {
    "rope_kv_cache_write": 4, "sparse_fmha_with_swa": 4, "grouped_output_projection": 4, "indexer_scores": 2,
    "indexer_topk": 2,
    "route_hash": 2, "route_sqrt_softplus": 2, "fp4_moe": 4,
}  # fmt: skip
# Two matrices of each expert of each layer are packed.
MODELS = {
    "gpt_oss": Model(
        "gpt_oss", dict(head_dim=32, swiglu_limit=1.0), "mxfp4", 25, {"mxfp4_quantize": 2 * 4 * 2},
        _GPT_OSS | {"flash_attention": 2}, _GPT_OSS | {"sdpa_decode": 2}, nvidia={"linear_decode": 6},
    ),
    "qwen3_5_moe": Model(
        "qwen3_5_moe",
        dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=32),
        "nvfp4", 32,
        {"nvfp4_quantize": 2 * 8 * 2}, _QWEN | {"flash_attention": 1, "causal_conv1d": 1, "gated_delta_rule": 1},
        _QWEN | {"causal_conv1d": 1, "gated_delta_step": 1, "sdpa_decode": 1}, nvidia={"linear_decode": 4},
    ),
    "deepseek_v3": Model(
        "deepseek_v3", {}, "mxfp4", 13, {"mxfp4_quantize": 2 * 4}, {"flash_attention": 2, "fp4_moe": 1},
        {"sdpa_decode": 2, "fp4_moe": 1},
    ),
    "deepseek_v4": Model(
        "deepseek_v4", dict(head_dim=128, index_head_dim=64, swiglu_limit=1.0), "mxfp4", 32,
        {"mxfp4_quantize": 2 * 4 * 4}, _V4, _V4,
    ),
}  # fmt: skip
# As it is served: rows of different lengths, in a cache of which the device alone knows how full it is.
MODELS["gpt_oss_served"] = replace(
    MODELS["gpt_oss"], padding=7, options=dict(cache_implementation="static", disable_compile=True),
    nvidia={"linear_decode": 6, "rope_kv_cache_append": 2},
)  # fmt: skip


def generate(model: Any, wanted: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, NEW) behind the prompt, chosen greedily, and logits (B, NEW, vocabulary)."""
    ids = tokens(ROWS, LENGTH, wanted.prompt)
    mask = torch.ones_like(ids)
    mask[-1, : wanted.padding] = 0
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, output_logits=True,
        return_dict_in_generate=True, **wanted.options,
    )  # fmt: skip
    return out.sequences[:, LENGTH:], torch.stack(out.logits, 1).double()


def eager(wanted: Model) -> Any:
    """transformers' own code, but for routers, on experts that FP4 holds: float16 has these numbers, too."""
    model = build(wanted.family, **wanted.sizes).half()
    return frozen(with_our_routers(round_experts_to_fp4(model, wanted.experts)))


def ours(wanted: Model) -> Any:
    return frozen(attnkit_model(build(wanted.family, **wanted.sizes).half(), experts=wanted.experts))


def all_on(target: Target, calls: Counter[tuple[str, str]]) -> None:
    """Fails, and says which, if an op ran anywhere but on a kernel of ``target``."""
    elsewhere = sorted(f"{op} on {where}" for op, where in calls if where != str(target))
    assert calls and not elsewhere, f"not on {target}: {', '.join(elsewhere) or 'nothing ran at all'}"


def in_simulator(wanted: Model, arch: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``generate`` returns, of a model that is packed and run in the simulator. Outputs of ops begin as NaN."""
    target = Target(arch, simulated=True)
    with ExitStack() as stack:
        stack.enter_context(torch_attnkit.simulate(arch))
        stack.enter_context(Runner("cpu", "", target).watching(SCHEDULE))
        outputs = stack.enter_context(guarded_outputs())
        ran = stack.enter_context(torch_attnkit.record())  # inside: a checked Metal run hides ops from what is outside
        got = generate(ours(wanted), wanted)
    all_on(target, ran.calls)
    assert Counter({op: n for (op, _), n in ran.calls.items()}) == wanted.calls(arch)
    for output in outputs:
        output.check(f"{wanted.family} on {target}")
    return got


def compare(wanted: Model, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Tokens equal to eager's, and logits as close to float64 as parity asks of an op."""
    chosen, logits = got
    eager_chosen, eager_logits = generate(eager(wanted), wanted)
    _, exact = generate(eager(wanted).double(), wanted)
    error, best = float((eager_logits - exact).abs().max()), exact.topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > 8 * error, "the prompt has a token that roundings may change"
    assert torch.equal(chosen, eager_chosen)
    assert float((logits - exact).abs().max()) <= 2 * error


def needs(arch: str) -> None:
    if missing := simulators()[arch]:
        pytest.skip(missing)
    if arch != "metal":
        pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")


CHEAPEST = ("gpt_oss", "metal")  # clang compiles its kernels in seconds, CuTeDSL takes longer
SERVED = {arch: {op for op in OPS if any(arch in row.archs for row in OPS[op].kernels)} for arch in SIMULATED}
PAIRS = [
    pytest.param(name, arch, marks=[] if (name, arch) == CHEAPEST else pytest.mark.proof)
    for name, model in MODELS.items()
    for arch in SIMULATED
    if model.calls(arch).keys() <= SERVED[arch]  # another is refused
]


def test_each_architecture_has_the_ops_of_every_model():
    assert {p.values for p in PAIRS} == {(name, arch) for name in MODELS for arch in SIMULATED}


@pytest.mark.parametrize(("model", "arch"), PAIRS)
def test_a_model_decodes_in_a_checked_simulator_as_eager_does(model, arch):
    """Bounds, races, uninitialised memory, a hostile schedule: on what a model hands over, cache and all."""
    needs(arch)
    compare(MODELS[model], in_simulator(MODELS[model], arch))


def test_what_runs_on_the_reference_is_noticed():
    """The same model outside the simulator, and no model at all."""
    with torch_attnkit.record() as ran:
        generate(ours(MODELS["gpt_oss"]), MODELS["gpt_oss"])
    with pytest.raises(AssertionError, match=r"not on metal \(simulated\): .*sdpa_decode on cpu"):
        all_on(Target("metal", simulated=True), ran.calls)
    with pytest.raises(AssertionError, match="nothing ran at all"):
        all_on(Target("metal", simulated=True), Counter())


def test_a_size_without_a_kernel_is_refused_and_does_not_fall_back():
    needs("metal")
    small = replace(MODELS["gpt_oss"], sizes=dict(head_dim=16))
    model = ours(small)
    with (
        torch_attnkit.simulate("metal"),
        pytest.raises(UnsupportedError, match=r"flash_attention on metal \(simulated\): mps: D=16 not in"),
    ):
        generate(model, small)


def test_a_decode_step_of_gpt_oss_is_five_launches_a_layer_on_metal():
    """Attention, the router, and up, down and the combination of the experts."""
    needs("metal")
    from torch_attnkit.sim import metal

    wanted = MODELS["gpt_oss"]
    model, ids = ours(wanted), tokens(ROWS, LENGTH, wanted.prompt)
    with torch_attnkit.simulate("metal"):
        out = model(ids, use_cache=True)
        with metal.counting() as launches:
            model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    layer = ["decode_rows", "route_rows", "experts_few_up", "experts_few_down", "experts_combine"]
    assert [launch.kernel for launch in launches] == layer * model.config.num_hidden_layers


@pytest.mark.proof
def test_a_decode_step_of_gpt_oss_over_a_static_cache_is_six_launches_a_layer_on_hopper():
    """Rotations and rows of the cache, attention, the product from heads, the router's choice, and two of the experts,
    whose slots are few. Others are the model's norms and sums, and its products to heads and of the router."""
    needs("sm90")
    from torch_attnkit.sim import ptx

    wanted = MODELS["gpt_oss"]
    model, ids = ours(wanted), tokens(ROWS, LENGTH, wanted.prompt)
    cache = StaticCache(model.config, max_cache_len=LENGTH + 1)
    with torch_attnkit.simulate("sm90"):
        out = model(ids, past_key_values=cache)
        with ptx.counting() as launches:
            model(out.logits[:, -1:].argmax(-1), past_key_values=cache)
    layer = ["cacheappend", "decode", "batched_gemm", "routing", "grouped_gemm", "grouped_gemm"]
    layer *= model.config.num_hidden_layers
    assert len(launches) == len(layer)
    assert all(f"kernels{part}" in launch.kernel for part, launch in zip(layer, launches, strict=True))
