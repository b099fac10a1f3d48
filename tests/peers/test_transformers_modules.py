"""What attnkit_model replaces in a transformers model: norms, routers, experts, DeepSeek-V4's attention.

Models are compared in float64, where both do the same arithmetic in another order (AGREE), or in float32 against
float64, where ours may be off by four times what the original is. Routing weights are float32 in our ops and are taken
from them on both sides of a comparison in float64.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import torch_attnkit
from tests.peers.tiny_models import DECODERS, FAMILIES, build, frozen, modules, tokens, with_our_routers
from torch_attnkit import UnsupportedError
from torch_attnkit.formats import fp8
from torch_attnkit.integrations.transformers import attnkit_model, norms, round_experts_to_fp4, routers

AGREE = 1e-10
EXPERTS = ("gpt_oss", "qwen3_5_moe", "qwen3_next", "deepseek_v4")
formats = pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
experts_families = pytest.mark.parametrize("family", EXPERTS)

SWAPPED = {
    "bert": {}, "modernbert": {},
    "llama": {"LlamaAttention": 2},
    "mistral": {"MistralAttention": 2},
    "gemma2": {"Gemma2Attention": 2},
    "gemma3": {"Gemma3Attention": 2},
    "gpt_oss": {"GptOssAttention": 2, "GptOssTopKRouter": 2},
    "qwen3_5": {"Qwen3_5Attention": 1, "Qwen3_5GatedDeltaNet": 3, "Qwen3_5RMSNormGated": 3},
    "qwen3_5_moe": {
        "Qwen3_5MoeAttention": 1, "Qwen3_5MoeGatedDeltaNet": 3, "Qwen3_5MoeRMSNormGated": 3, "Qwen3_5MoeTopKRouter": 4,
    },
    "qwen3_next": {
        "Qwen3NextAttention": 1, "Qwen3NextGatedDeltaNet": 3, "Qwen3NextRMSNormGated": 3, "Qwen3NextTopKRouter": 4,
    },
    "olmo_hybrid": {"OlmoHybridAttention": 1, "OlmoHybridGatedDeltaNet": 3, "OlmoHybridRMSNormGated": 3},
    "deepseek_v4": {"DeepseekV4Attention": 4, "DeepseekV4HashRouter": 2, "DeepseekV4TopKRouter": 2},
}  # fmt: skip
OPS = {
    "gpt_oss": {"route_softmax"},
    "qwen3_5": {"gated_delta_step", "gated_rmsnorm"},
    "qwen3_5_moe": {"gated_delta_step", "gated_rmsnorm", "route_softmax"},
    "qwen3_next": {"gated_delta_step", "gated_rmsnorm", "route_softmax"},
    "olmo_hybrid": {"gated_delta_step", "gated_rmsnorm"},
}
V4_OPS = {
    "sparse_fmha_with_swa", "indexer_scores", "indexer_topk", "grouped_output_projection", "route_hash",
    "route_sqrt_softplus",
}  # fmt: skip


def same(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.shape == ours.shape and bool(theirs.isfinite().all())
    assert float((theirs - ours).abs().max()) <= AGREE * float(theirs.abs().max())


@cache
def v4_pair():
    """(eager with our routers, ours), both in float64. Nobody may change them."""
    eager = frozen(with_our_routers(build("deepseek_v4")).double())
    return eager, frozen(attnkit_model(build("deepseek_v4")).double())


def generate(model, ids, mask, new, **kwargs):
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, output_logits=True,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


# The whole model.


@pytest.mark.parametrize("family", FAMILIES)
def test_attnkit_model_says_what_it_replaced_and_a_second_call_changes_nothing(family):
    model = build(family)
    assert attnkit_model(model) is model
    assert model.attnkit_swapped == SWAPPED[family]
    assert model.config._attn_implementation == "attnkit"
    classes = [type(m) for m in model.modules()]
    attnkit_model(model)
    assert model.attnkit_swapped == SWAPPED[family] and [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("family", DECODERS)
def test_a_replaced_model_is_as_close_to_float64_as_eager(family):
    """Everything replaced, in float32, prefill and four decode steps; and the ops ran."""
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    exact = generate(frozen(build(family).double()), ids, mask, 4)[1]
    theirs = generate(frozen(build(family)), ids, mask, 4)[1]
    with torch_attnkit.record() as recorded:
        ours = generate(frozen(attnkit_model(build(family))), ids, mask, 4)[1]
    scale = float(exact.abs().max())
    limit = 4 * float((theirs - exact).abs().max()) + 1e-6 * scale
    assert float((ours - exact).abs().max()) <= limit < 1e-3 * scale
    expected = V4_OPS if family == "deepseek_v4" else {"flash_attention", "sdpa_decode"} | OPS.get(family, set())
    assert {op for op, _ in recorded.calls} == expected


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v4"])
def test_copies_pickles_and_state_dicts_go_on_working(family):
    original, model = frozen(build(family)), frozen(attnkit_model(build(family)))
    assert model.state_dict().keys() == original.state_dict().keys()
    ids = tokens(2, 12)
    expected = model(ids).logits
    stream = io.BytesIO(pickle.dumps(model))
    for other in (copy.deepcopy(model), pickle.load(stream)):
        assert other.attnkit_swapped == SWAPPED[family]
        assert torch.equal(other(ids).logits, expected)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(original.state_dict())
    assert torch.equal(model(ids).logits, expected)


@experts_families
def test_router_logits_are_still_captured(family):
    """transformers finds the routers by their class; a replaced one is of it."""
    ids = tokens(2, 6)
    models = frozen(build(family).double()), frozen(build(family)), frozen(attnkit_model(build(family)))
    exact, theirs, ours = (model(ids, output_router_logits=True).router_logits for model in models)
    assert len(theirs) == len(ours) == len(exact) > 0
    for e, a, b in zip(exact, theirs, ours, strict=True):
        limit = 4 * (a - e).abs().max() + 1e-6 * e.abs().max()  # as of the whole model's logits
        assert (b - e).abs().max() <= limit


@pytest.mark.parametrize("family", DECODERS)
def test_no_layer_waits_for_the_device(family):
    """Prefill and a decode step run on tensors without data, which nothing can read."""
    model = frozen(attnkit_model(build(family), experts="mxfp4" if family in EXPERTS else None))
    with FakeTensorMode(allow_non_fake_inputs=True):
        filled = DynamicCache(config=model.config)
        assert model(tokens(2, 12), past_key_values=filled).logits.shape == (2, 12, 128)
        assert model(tokens(2, 1), past_key_values=filled).logits.shape == (2, 1, 128)


# Norms and routers.


@pytest.mark.parametrize("original", norms.SWAPS, ids=lambda c: c.__name__)
def test_a_gated_norm_rounds_once_where_the_original_rounds_thrice(original):
    """In float64 both agree but for the float32 that the original computes in; in bfloat16 ours is the closer."""
    gen = torch.Generator().manual_seed(0)
    y, z = torch.randn(2, 64, 32, generator=gen, dtype=torch.float64).to(torch.bfloat16)
    norm = original(32, eps=1e-5)
    norm.weight.data.copy_(torch.randn(32, generator=gen))
    norm = norm.to(torch.bfloat16).requires_grad_(False)
    ours = copy.deepcopy(norm)
    ours.__class__ = norms.SWAPS[original]
    wide = y.double(), z.double()
    y64, z64 = wide
    exact = norm.weight.double() * y64 * (y64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * nn.functional.silu(z64)
    error = {m: float(((m(y, z).double() - exact) / exact).abs().max()) for m in (norm, ours)}
    assert error[ours] <= 2.0**-8 * 1.001 < error[norm]
    norm, ours = norm.double(), ours.double()
    assert float((norm(*wide) - exact).abs().max()) <= 2.0**-22 * float(exact.abs().max())
    same(exact, ours(*wide))


def test_a_gated_norm_with_another_activation_is_refused():
    model = build("qwen3_5")
    modules(model, "Qwen3_5RMSNormGated")[0].activation = "sigmoid"
    with pytest.raises(UnsupportedError, match="Qwen3_5RMSNormGated: activation is 'sigmoid', accepted: 'silu'"):
        attnkit_model(model)
    assert not modules(model, "_GatedRMSNorm"), "nothing may be replaced when anything is refused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("family", "changes"), [*((f, {}) for f in EXPERTS), ("qwen3_next", dict(norm_topk_prob=False))]
)
def test_a_replaced_router_returns_what_the_original_does(family, changes, dtype):
    """The same experts, weights apart by roundings to the model dtype, and dtypes that the eager experts accept."""
    ours = attnkit_model(build(family, **changes)).to(dtype)
    theirs = build(family, **changes).to(dtype)
    gen = torch.Generator().manual_seed(0)
    hidden, ids = torch.randn(2, 40, 64, generator=gen).to(dtype), torch.randint(0, 128, (2, 40), generator=gen)
    pairs = list(zip(modules(theirs, "Router"), modules(ours, "Router"), strict=True))
    assert pairs and all(type(b) is routers.SWAPS[type(a)] for a, b in pairs)
    for a, b in pairs:
        x = hidden if family == "deepseek_v4" else hidden.flatten(0, 1)
        args = (x, ids) if "Hash" in type(a).__name__ else (x,)
        (logits_a, weights_a, index_a), (logits_b, weights_b, index_b) = a(*args), b(*args)
        assert torch.equal(logits_a, logits_b)
        assert (weights_a.dtype, index_a.dtype) == (weights_b.dtype, index_b.dtype)
        order_a, order_b = index_a.sort(-1), index_b.sort(-1)
        # In bfloat16 the original may round two scores to the same number, and then either expert is right.
        clear = (order_a.values == order_b.values).all(-1)
        assert bool(clear.all()) if dtype == torch.float32 else float(clear.float().mean()) > 0.9
        wa, wb = (w.gather(1, o.indices)[clear] for w, o in ((weights_a, order_a), (weights_b, order_b)))
        assert torch.allclose(wa, wb, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_a_hash_router_needs_token_ids():
    model = frozen(attnkit_model(build("deepseek_v4")))
    embeddings = model.get_input_embeddings()(tokens(1, 4))
    with pytest.raises(UnsupportedError, match="DeepseekV4HashRouter: input_ids is None, accepted: token ids"):
        model(inputs_embeds=embeddings)


def test_another_scoring_function_is_refused():
    with pytest.raises(UnsupportedError, match=r"DeepseekV4\w+Router: scoring_func is \w+, accepted: 'sqrtsoftplus'"):
        attnkit_model(build("deepseek_v4", scoring_func="sigmoid"))


# DeepSeek-V4's attention.


@pytest.mark.parametrize("cached", [False, True], ids=["stateless", "cached"])
@pytest.mark.parametrize("length", [1, 3, 8, 37])
def test_a_deepseek_v4_forward_pass_equals_eager(length, cached):
    eager, ours = v4_pair()
    ids = tokens(2, length)
    same(eager(ids, use_cache=cached).logits, ours(ids, use_cache=cached).logits)


@pytest.mark.parametrize("length", [3, 8, 20])
@pytest.mark.parametrize("left_padding", [False, True], ids=["whole", "padded"])
def test_deepseek_v4_generates_what_eager_does(length, left_padding):
    """Left padding included, as eager has it: see the next test."""
    eager, ours = v4_pair()
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    if left_padding:
        mask[1, : length // 3] = 0
    (tokens_a, logits_a), (tokens_b, logits_b) = (generate(m, ids, mask, 14) for m in (eager, ours))
    assert torch.equal(tokens_a, tokens_b)
    same(logits_a, logits_b)


def test_a_left_padded_row_of_deepseek_v4_is_not_the_row_itself():
    """What transformers does, pinned: padding tokens are pooled into compressed entries."""
    ids = tokens(2, 37)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    for model in v4_pair():
        row, alone = model(ids, attention_mask=mask).logits[1, 6:], model(ids[1:, 6:]).logits[0]
        assert float((row - alone).abs().max()) > 0.1


def test_deepseek_v4_in_chunks_equals_eager():
    ids, results = tokens(2, 37), []
    for model in v4_pair():
        filled = DynamicCache(config=model.config)
        parts = [model(ids[:, a:b], past_key_values=filled).logits for a, b in ((0, 13), (13, 15), (15, 37))]
        results.append(torch.cat(parts, 1))
    same(*results)


@pytest.mark.parametrize("chunk", [4, 5, 7])
def test_deepseek_v4_in_chunks_of_generate_behind_left_padding_equals_eager(chunk):
    """A row may hold nothing but padding in the first chunks, and its padding is pooled like other tokens."""
    ids = tokens(3, 20)
    mask = torch.ones_like(ids)
    mask[1, :6] = mask[2, :13] = 0
    (tokens_a, logits_a), (tokens_b, logits_b) = (
        generate(model, ids, mask, 6, prefill_chunk_size=chunk) for model in v4_pair()
    )
    assert torch.equal(tokens_a, tokens_b)
    same(logits_a, logits_b)


def test_deepseek_v4_token_by_token_equals_eager():
    """Each step takes a column of the ids, whose rows do not lie beside one another."""
    ids, results = tokens(3, 12), []
    for model in v4_pair():
        filled = DynamicCache(config=model.config)
        results.append(torch.cat([model(ids[:, t : t + 1], past_key_values=filled).logits for t in range(12)], 1))
    same(*results)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (
            dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False),
            "packed sequences, is_causal=True",
        ),
        (dict(past_key_values=True), "window 8, 8 queries and 12 keys, accepted: .* 8 queries and 15 keys"),
    ],
)
def test_deepseek_v4_refuses_a_mask_of_another_call(call, found):
    _, ours = v4_pair()
    if "past_key_values" in call:  # a layer that holds more than the one that the mask was sized by
        filled = DynamicCache(config=ours.config)
        ours(tokens(1, 4), past_key_values=filled)
        layer = filled.layers[1]
        layer.keys = layer.values = layer.keys[:, :, [0, 0, 0, 0, 1, 2, 3]]
        call = dict(past_key_values=filled)
    with pytest.raises(UnsupportedError, match=f"DeepseekV4Attention: the mask was made for .*{found}"):
        ours(tokens(1, 8), **call)


def test_deepseek_v4_in_bfloat16_is_as_close_to_float64_as_eager():
    ids = tokens(2, 37)
    exact = v4_pair()[0](ids).logits
    errors = []
    for model in (with_our_routers(build("deepseek_v4")), attnkit_model(build("deepseek_v4"))):
        logits = frozen(model.to(torch.bfloat16))(ids).logits
        errors.append(float((logits.double() - exact).abs().mean()))
    assert errors[1] <= 1.25 * errors[0]


def test_deepseek_v4_wants_its_own_cache():
    with pytest.raises(ValueError, match=r"layer 1 of past_key_values is \w+, accepted: .*DynamicCache\(config="):
        v4_pair()[1](tokens(1, 4), past_key_values=DynamicCache())


def test_deepseek_v4_refuses_dropout_and_modules_it_does_not_know():
    model = attnkit_model(build("deepseek_v4", attention_dropout=0.5)).train()
    with pytest.raises(UnsupportedError, match=r"attention_dropout is 0\.5 in training, accepted: 0"):
        model(tokens(1, 4))
    model = build("deepseek_v4")
    model.model.layers[2].self_attn.o_a_proj = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match="o_a_proj is Linear.* accepted: a DeepseekV4GroupedLinear"):
        attnkit_model(model)
    model = build("deepseek_v4")
    model.model.layers[2].self_attn.compressor = nn.Identity()
    with pytest.raises(UnsupportedError, match="compressor is Identity, accepted: DeepseekV4CSACompressor"):
        attnkit_model(model)


# Experts.


@formats
@experts_families
def test_packed_experts_equal_eager_experts_on_rounded_weights(family, format):
    """Everything else is replaced in both, so that the experts alone differ. Limits are low enough to be reached."""
    changes = dict(swiglu_limit=1.0) if family in ("gpt_oss", "deepseek_v4") else {}
    eager = frozen(attnkit_model(round_experts_to_fp4(build(family, **changes), format)).double())
    packed = frozen(attnkit_model(build(family, **changes), experts=format).double())
    ids = tokens(2, 12)
    with torch_attnkit.record() as recorded:
        ours = packed(ids).logits
    same(eager(ids).logits, ours)
    found = modules(packed, "Experts")
    assert recorded.calls["fp4_moe", "reference"] == len(found) == packed.attnkit_swapped[type(found[0]).__name__] > 0


def read_back(x: torch.Tensor, activations: str) -> torch.Tensor:
    """x (..., K) as a quantised number has it."""
    if activations == "mxfp8":
        return fp8.dequantize(*fp8.quantize(x.float()), dtype=x.dtype)
    quantize, dequantize = (getattr(torch.ops.attnkit, f"{activations}_{do}") for do in ("quantize", "dequantize"))
    return dequantize(*quantize(x.float()), dtype=x.dtype)


@pytest.mark.parametrize("activations", ["nvfp4", "mxfp4", "mxfp8"])
@experts_families
def test_quantised_activations_equal_transformers_experts_on_rounded_inputs(family, activations):
    """What goes into both products is rounded: by hand around transformers' experts, inside fp4_moe in ours."""
    theirs = attnkit_model(round_experts_to_fp4(build(family), "mxfp4")).double()
    theirs.set_experts_implementation("batched_mm")  # asks _apply_gate in every family
    for module in modules(theirs, "Experts"):
        gate = module._apply_gate
        module._apply_gate = lambda both, gate=gate: read_back(gate(both), activations)
        module.register_forward_pre_hook(lambda _, args: (read_back(args[0], activations), *args[1:]))
    model = attnkit_model(build(family), experts="mxfp4", activations=activations)
    ids = tokens(2, 12)
    with _Seen() as seen:
        ours = frozen(model.double())(ids).logits
    same(frozen(theirs)(ids).logits, ours)
    assert not any("quantize" in name for name in seen.names)
    plain = attnkit_model(model, experts="mxfp4")(ids).logits
    assert not torch.allclose(plain, ours, rtol=0, atol=1e-3)
    assert torch.equal(attnkit_model(model, experts="mxfp4", activations=activations)(ids).logits, ours)


class _Seen(TorchDispatchMode):
    """The names of the ops that run, and the weights and indices that fp4_moe is given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.routed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] == "fp4_moe":
            self.routed.append(args[1:3])
        return func(*args, **(kwargs or {}))


@experts_families
def test_nothing_lies_between_a_router_and_packed_experts(family):
    """fp4_moe gets what the routing op returned, unrounded: no conversion of weights or indices runs in between."""
    model = attnkit_model(build(family))  # in two calls, of which the first knows of no packed experts
    model = frozen(attnkit_model(model, experts="mxfp4").to(torch.bfloat16))
    with _Seen() as seen:
        model(tokens(2, 6))
    assert len(seen.routed) == sum(count for name, count in model.attnkit_swapped.items() if "Router" in name) > 0
    assert {(w.dtype, i.dtype) for w, i in seen.routed} == {(torch.float32, torch.int32)}
    routers_at = [n for n, name in enumerate(seen.names) if name.startswith("route_")]
    for n in routers_at:
        assert "_to_copy" not in seen.names[n : seen.names.index("fp4_moe", n)]


@experts_families
def test_a_compiled_moe_block_is_one_graph(family):
    """Router, packed experts and what stands beside them, in bfloat16: nothing looks at the data."""
    model = frozen(attnkit_model(build(family), experts="mxfp4").to(torch.bfloat16))
    gen = torch.Generator().manual_seed(0)
    x, ids = torch.randn(2, 6, 64, generator=gen).to(torch.bfloat16), tokens(2, 6)
    blocks = [m for m in model.modules() if "experts" in dict(m.named_children())]
    assert len(blocks) == len(modules(model, "Router"))
    for block in blocks:
        torch._dynamo.reset()
        kwargs = dict(input_ids=ids) if family == "deepseek_v4" else {}
        compiled = torch.compile(
            lambda x, block=block, kwargs=kwargs: block(x, **kwargs), backend="aot_eager", fullgraph=True
        )
        expected, got = block(x, **kwargs), compiled(x)
        pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_routers_keep_their_dtypes_for_experts_of_several_ranks():
    """Their dispatch counts tokens by index, which torch wants as int64."""
    model = build("qwen3_5_moe")
    experts = modules(model, "Qwen3_5MoeExperts")
    experts[0]._is_expert_parallel = True
    attnkit_model(model, experts="mxfp4").to(torch.bfloat16)
    _, weights, index = modules(model, "Router")[0](torch.randn(3, 64, dtype=torch.bfloat16))
    assert (weights.dtype, index.dtype) == (torch.bfloat16, torch.int64)


@formats
@experts_families
def test_packed_experts_generate_without_their_parameters(family, format):
    """A packed model generates, and its state_dict is whole: it loads into another that was packed the same way."""
    model = frozen(attnkit_model(build(family), experts=format))
    names = [n for n, _ in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj")) and ".experts." in n]
    assert names == []
    ids = tokens(2, 10)
    expected = generate(model, ids, torch.ones_like(ids), 4)
    other = attnkit_model(build(family), experts=format)
    with torch.no_grad():
        for t in (*other.parameters(), *(b for n, b in other.named_buffers() if ".experts." in n)):
            t.zero_()
    other.load_state_dict(model.state_dict())
    for again in (other, copy.deepcopy(model)):
        found = generate(frozen(again), ids, torch.ones_like(ids), 4)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert attnkit_model(model, experts=format).state_dict().keys() == other.state_dict().keys()


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_packed_weights_survive_a_change_of_the_model_dtype(format, dtype):
    """Scales beyond the range of float16 included: weights of 1e-4 have a scale of 2^24."""
    model = build("gpt_oss")
    with torch.no_grad():
        modules(model, "GptOssExperts")[0].gate_up_proj.mul_(1e-4)
    module = modules(attnkit_model(model, experts=format), "GptOssExperts")[0]
    before = {n: b.clone() for n, b in module.named_buffers()}
    model.to(dtype)
    assert before and all(torch.equal(b, before[n]) for n, b in module.named_buffers())
    assert bool(frozen(model)(tokens(1, 5)).logits.isfinite().all())


@formats
def test_rounded_weights_are_exact_in_bfloat16_and_close_to_what_they_were(format):
    """Between 4 and 6 scales a number may be off by one scale, and then the largest of its block is at least 5."""
    original, rounded = build("gpt_oss"), round_experts_to_fp4(build("gpt_oss"), format)
    for a, b in zip(modules(original, "GptOssExperts"), modules(rounded, "GptOssExperts"), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            was, now = getattr(a, name).detach(), getattr(b, name).detach()
            assert torch.equal(now, now.to(torch.bfloat16).float()) and not torch.equal(was, now)
            block = {"mxfp4": 32, "nvfp4": 16}[format]
            largest = was.transpose(1, 2).unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True)
            off = (was - now).transpose(1, 2).unflatten(-1, (-1, block)).abs()
            assert bool((off <= largest / 5).all())
        assert torch.equal(a.gate_up_proj_bias, b.gate_up_proj_bias)


@pytest.mark.parametrize("rounding", ["ceil", "floor"])
def test_weights_that_were_mxfp4_before_stay_as_they_are(rounding):
    """Whichever rule their scales came from: published checkpoints use "floor"."""
    model = build("gpt_oss")
    module = modules(model, "GptOssExperts")[0]
    quantized = torch.ops.attnkit.mxfp4_quantize(module.gate_up_proj.detach().mT.contiguous(), rounding=rounding)
    weight = torch.ops.attnkit.mxfp4_dequantize(*quantized).mT
    module.gate_up_proj.data.copy_(weight)
    round_experts_to_fp4(model, "mxfp4")
    assert torch.equal(module.gate_up_proj, weight)


def test_experts_of_other_ranks_are_skipped():
    """Under expert parallelism the number behind the last expert stands for "not here"."""
    model = frozen(attnkit_model(build("qwen3_5_moe"), experts="mxfp4"))
    module = modules(model, "Qwen3_5MoeExperts")[0]
    x, weights = torch.randn(3, 64), torch.rand(3, 2)
    index = torch.tensor([[1, 8], [8, 8], [0, 3]])
    module._is_expert_parallel = True
    out = module(x, index, weights)
    kept = weights.masked_fill(index == 8, 0)
    module._is_expert_parallel = False
    assert torch.allclose(out, module(x, index.clamp(max=7), kept), rtol=0, atol=1e-6) and not out[1].any()


@experts_families
def test_experts_that_are_not_packed_are_refused(family):
    model = attnkit_model(build(family))
    model.set_experts_implementation("attnkit")
    with pytest.raises(
        UnsupportedError, match=r"\w+Experts holds ordinary weights.*attnkit_model\(model, experts='mxfp4'\)"
    ):
        model(tokens(1, 4))


def test_packed_experts_fail_under_another_experts_implementation():
    model = attnkit_model(build("gpt_oss"), experts="mxfp4")
    model.set_experts_implementation("eager")
    with pytest.raises(AttributeError, match="gate_up_proj"):
        model(tokens(1, 4))


# Refusals of attnkit_model and round_experts_to_fp4.


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(TypeError, match="attnkit_model: model is Linear, accepted: a transformers PreTrainedModel"):
        attnkit_model(nn.Linear(2, 2))


@pytest.mark.parametrize("call", [lambda m, f: attnkit_model(m, experts=f), round_experts_to_fp4])
def test_models_and_formats_without_packing_are_refused(call):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts modules, accepted: .* ExpertsInterface"):
        call(build("llama"), "mxfp4")
    with pytest.raises(ValueError, match="format is 'fp8', accepted: 'nvfp4', 'mxfp4'"):
        call(build("gpt_oss"), "fp8")
    with pytest.raises(UnsupportedError, match=r"mlp\.experts: act_fn is GELUActivation, accepted: silu"):
        call(build("qwen3_5_moe", hidden_act="gelu"), "mxfp4")
    with pytest.raises(UnsupportedError, match="down_proj contracts 24 numbers, accepted for mxfp4: multiples of 32"):
        call(build("qwen3_5_moe", moe_intermediate_size=24), "mxfp4")


def test_activations_that_fp4_moe_has_not_are_refused():
    with pytest.raises(ValueError, match="activations is 'fp8', accepted: 'none', 'nvfp4', 'mxfp4', 'mxfp8'"):
        attnkit_model(build("gpt_oss"), experts="mxfp4", activations="fp8")
    with pytest.raises(ValueError, match="activations is 'mxfp8', accepted without experts: 'none'"):
        attnkit_model(build("gpt_oss"), activations="mxfp8")
    model = attnkit_model(build("qwen3_5_moe", moe_intermediate_size=48), experts="nvfp4")
    message = "down_proj contracts 48 numbers, accepted for nvfp4 with activations 'mxfp8': multiples of 32"
    with pytest.raises(UnsupportedError, match=message):
        attnkit_model(model, experts="nvfp4", activations="mxfp8")
    assert modules(model, "Experts")[0].attnkit_activations == "none"


def test_packing_twice_in_two_formats_is_refused():
    model = attnkit_model(build("gpt_oss"), experts="mxfp4")
    with pytest.raises(ValueError, match="packed to mxfp4 already, not nvfp4"):
        attnkit_model(model, experts="nvfp4")
    with pytest.raises(ValueError, match="the experts are packed already, accepted: ordinary weights"):
        round_experts_to_fp4(model, "mxfp4")


def test_a_module_with_a_forward_of_its_own_is_refused():
    model = build("gpt_oss")
    router = modules(model, "GptOssTopKRouter")[0]
    router.forward = router.forward
    with pytest.raises(UnsupportedError, match="a GptOssTopKRouter has a forward of its own"):
        attnkit_model(model)
