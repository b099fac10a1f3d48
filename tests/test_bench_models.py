"""The bench of whole models, on a CPU: what it times is what the models compute, and a wrong result is called wrong.

Sizes are small and numbers float32, or bfloat16 where the judge is asked.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DeepseekV4ForCausalLM, GptOssForCausalLM, Qwen3_5MoeForCausalLM, StaticCache

import torch_attnkit
from bench import models, timing, whole
from torch_attnkit import UnsupportedError

_SMALL = dict(vocab_size=128, hidden_size=64, num_attention_heads=4, num_experts_per_tok=2, sliding_window=8)
_GPT_OSS = _SMALL | dict(intermediate_size=64, num_key_value_heads=2, head_dim=16, num_local_experts=4)
_V4 = _SMALL | dict(
    moe_intermediate_size=32, n_routed_experts=8, head_dim=32, q_lora_rank=32, o_groups=2, o_lora_rank=16,
    index_n_heads=4, index_head_dim=16, partial_rotary_factor=0.25,
)  # fmt: skip


def gpt_oss(dtype=torch.float32):
    return models.built(GptOssForCausalLM, models.gpt_oss_config(4, **_GPT_OSS), "cpu", dtype)


@torch.no_grad()
def test_the_window_of_the_bench_is_the_librarys():
    """Prefill and steps until the window has moved on, each compared."""
    model, ids = gpt_oss(), torch.randint(128, (2, 14))
    caches = StaticCache(model.config, max_cache_len=16), models._cache(model, 16)
    for a, b in ((0, 5), *((t, t + 1) for t in range(5, 14))):
        theirs, ours = (model(ids[:, a:b], past_key_values=cache).logits for cache in caches)
        assert torch.equal(theirs, ours)


@torch.no_grad()
def test_a_prefill_and_a_step_are_the_models_own():
    """With masks from outside and a cache that is set back: what the model gives without either, again and again."""
    model = gpt_oss()
    run = models.prefill(20).make(model)
    torch.manual_seed(0)
    plain = model(torch.randint(128, (1, 20)), use_cache=False).logits
    assert torch.equal(run(), run())
    assert torch.equal(run(), plain)
    step, ours = (models.decode(3, 20).make(m) for m in (model, models.ours_of(model)))
    with torch_attnkit.record() as recorded:
        got, want = ours(), step()
    near = 16 * torch.finfo(torch.float32).eps * want.abs().max().item()  # sums in another order: seen 6.2 eps
    torch.testing.assert_close(got, want, rtol=0, atol=near)
    assert {op: n for (op, _), n in recorded.calls.items()} == {
        "rope_kv_cache_append": 4, "sdpa_decode": 4, "route_softmax": 4, "fp4_moe": 4
    }  # fmt: skip


@torch.no_grad()
def test_a_right_result_is_told_from_a_wrong_one():
    """In bfloat16 every case of the small models passes, and fails once experts are mixed up."""
    theirs = gpt_oss(torch.bfloat16)
    v4 = models.built(DeepseekV4ForCausalLM, models.deepseek_v4_config(**_V4), "cpu")
    pairs = [(theirs, models.ours_of(theirs), case) for case in (models.decode(4, 20), models.prefill(64))]
    ours = models.ours_of(v4)
    blocks = zip(v4.model.layers, ours.model.layers, strict=True)
    pairs += [(a.mlp, b.mlp, models.moe(64, 128)) for a, b in blocks]
    for a, b, case in pairs:
        wanted, exact = case.results(a), case.results(models.exact_of(a))
        good, message = models.judged(case, case.results(b), wanted, exact)
        assert good and f"of {max(64, case.rows)} rows" in message and ("tokens equal" in message) == case.choice
        experts = [m for m in b.modules() if hasattr(m, "down_proj_packed")]
        for module in experts:
            module.down_proj_packed = module.down_proj_packed.flip(0)
        assert not models.judged(case, case.results(b), wanted, exact)[0]
        for module in experts:
            module.down_proj_packed = module.down_proj_packed.flip(0)
        few = case.results(b)
        few[::3] = few[::3].flip(1)
        assert not models.judged(case, few, wanted, exact)[0]


_QWEN = dict(
    vocab_size=128, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32,
    shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32,
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_layer_of_linear_attention_is_judged(tokens):
    """Steps by gated_delta_step; prompts have no kernel on a CPU. A decay that is off is called wrong."""
    config = models.qwen3_5_config(**_QWEN)
    theirs = models.built(Qwen3_5MoeForCausalLM, config, "cpu", experts=None)
    pair = [model.model.layers[0].linear_attn for model in (theirs, models.ours_of(theirs, None))]
    case = models.linear(4, tokens, config)
    with torch_attnkit.record() as recorded:
        found = case.results(pair[1])
    assert {op for op, _ in recorded.calls} == {"gated_rmsnorm"} | ({"gated_delta_step"} if tokens == 1 else set())
    wanted, exact = case.results(pair[0]), case.results(models.exact_of(pair[0]))
    assert models.judged(case, found, wanted, exact)[0]
    pair[1].A_log.add_(1)
    assert not models.judged(case, case.results(pair[1]), wanted, exact)[0]


@torch.no_grad()
def test_a_comparison_counts_what_is_wrong_and_goes_on_behind_what_fails(monkeypatch, capsys):
    """What needs a GPU is replaced: memory and time."""
    monkeypatch.setattr(models, "peak", lambda run: 3_000_000)
    monkeypatch.setattr(models, "timed", lambda case, pair: "a time")
    monkeypatch.setattr(models.console, "_width", 500)

    def fails(model, sample=0):
        if hasattr(model.model.layers[0].mlp.experts, "down_proj_packed"):
            raise ValueError("no such kernel")
        return lambda: torch.zeros(1, 64, 128)

    theirs = gpt_oss(torch.bfloat16)
    ours = models.ours_of(theirs)
    cases = [models.Case("broken", 64, fails, True), models.decode(4, 20)]
    assert models.compare("tiny", theirs, ours, cases) == 1
    message = capsys.readouterr().out
    assert "broken: FAILED: ValueError: no such kernel" in message
    assert "decode, batch 4, context 20: right: median row's error" in message
    assert "a time; memory besides weights and cache: ours 3 MB, transformers 3 MB" in message
    for module in ours.modules():
        if hasattr(module, "down_proj_packed"):
            module.down_proj_packed.zero_()
    assert models.compare("tiny", theirs, ours, [models.decode(4, 20)]) == 1
    message = capsys.readouterr().out
    assert "decode, batch 4, context 20: WRONG" in message and "a time" not in message


@torch.no_grad()
def test_whole_steps_are_compiled_once_and_a_wrong_one_is_told(monkeypatch, capsys):
    """What needs a GPU is replaced: graphs, their kernels and time. Weights that are packed are not copied before."""
    monkeypatch.setattr(models.console, "_width", 500)
    monkeypatch.setattr(models, "_captured", lambda run: (timing.Run(run, 1), ""))
    monkeypatch.setattr(models.timing, "interleaved", lambda runs: [float(n) for n in range(1, len(runs) + 1)])
    monkeypatch.setattr(whole, "launches", lambda run, layers: [f"{layers} layers"])
    theirs = gpt_oss(torch.bfloat16)
    counter = CompileCounterWithBackend("eager")
    found = whole.contenders(theirs, {"backend": counter}, False)
    assert hasattr(theirs.model.layers[0].mlp.experts, "down_proj")
    case = models.decode(4, 20)
    assert whole.compare(found, [case], 4, True) == 0
    message = capsys.readouterr().out
    assert counter.frame_count == 1 and "decode, batch 4, context 20: right: median row is" in message
    assert "compiled 1 us, modules 2 us, transformers 3 us; transformers' time / compiled 3.00" in message
    assert message.count("4 layers") == 3
    good = [whole.rows(case, found[name]) for name in ("modules", "modules", "transformers")]
    assert whole.judged(*good)[0]
    assert (
        not whole.judged(good[0].flip(1), *good[1:])[0] and not whole.judged(*(t.flip(1) for t in good[:2]), good[2])[0]
    )
    assert not whole.judged(good[0] / 0, *good[1:])[0]


@torch.no_grad()
def test_launches_are_counted_by_call_and_layer(monkeypatch):
    event = type("Event", (), {})
    kernels = [event(), event()]
    for kernel, (count, total, name) in zip(kernels, ((16, 80.0, "gemm"), (8, 8.0, "copy")), strict=True):
        kernel.count, kernel.self_device_time_total, kernel.key = count, total, name
    monkeypatch.setattr(models, "launched", lambda go: kernels)
    lines = whole.launches(timing.Run(lambda: None, 8), 2)
    assert lines[0] == "3 launches, 11 us in them; 1.5 launches a layer"
    assert lines[1].split() == "2.0 x 5.00 us gemm".split() and lines[2].split() == "1.0 x 1.00 us copy".split()


@pytest.mark.seconds(240)
@torch.no_grad()
def test_the_kernels_of_the_models_are_found_without_their_weights():
    cases = models.Cases([models.decode(1, 4096), models.prefill(4096)], [models.moe(1), models.moe(4096)], [])
    found = models.kernels(4, cases, "sm90")
    assert len(found) == len(set(found))
    assert {r.family for r in found} == {"fp4", "decode", "prefill", "routing", "grouped_gemm", "cache", "batched_gemm"}
    assert {r.trace for r in found if r.family == "grouped_gemm"} == {"trace", "trace_wgmma"}
    windows = {dict(r.signature)["window"] for r in found if r.family == "prefill"}
    assert windows == {True, False}


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore")
@pytest.mark.seconds(300)
@pytest.mark.proof
@torch.no_grad()
def test_models_are_right_on_simulated_kernels_of_hopper(monkeypatch):
    """Each kernel with what a model gives it: strided queries, a static cache, router's outputs, packed experts."""
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    monkeypatch.setattr(models, "_ROWS", 8)
    wide = dict(hidden_size=128, intermediate_size=128, num_attention_heads=8, head_dim=64, sliding_window=16)
    settings = models.gpt_oss_config(2, **_GPT_OSS | wide)
    theirs = models.built(GptOssForCausalLM, settings, "cpu")
    v4 = models.built(DeepseekV4ForCausalLM, models.deepseek_v4_config(**_V4 | dict(hidden_size=128)), "cpu")
    packed = models.ours_of(v4)
    runs = [(theirs, models.ours_of(theirs), case) for case in (models.decode(8, 40), models.prefill(40))]
    runs += [(a.mlp, b.mlp, models.moe(8, 128)) for a, b in zip(v4.model.layers, packed.model.layers, strict=True)]
    ran = set()
    for a, b, case in runs:
        with torch_attnkit.simulate("sm90"), torch_attnkit.record() as recorded:
            got = case.results(b)
        good, message = models.judged(case, got, case.results(a), case.results(models.exact_of(a)))
        assert good, f"{case.name}: {message}"
        ran |= set(recorded.calls)
    routes = {"route_softmax", "route_hash", "route_sqrt_softplus"}
    assert ran == {(op, "sm90 (simulated)") for op in {"sdpa_decode", "flash_attention", "fp4_moe"} | routes}
    with torch_attnkit.simulate("sm90"), pytest.raises(UnsupportedError, match="sparse_fmha_with_swa on sm90"):
        packed(torch.ones(1, 8, dtype=torch.long))
