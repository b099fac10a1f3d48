"""A decode step of GPT-OSS over a static cache: where rotations and rows are one launch, and that nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.models.gpt_oss import modeling_gpt_oss

import torch_attnkit
from tests.peers.tiny_models import build, frozen, modules, tokens
from torch_attnkit.integrations.transformers import attnkit_model, products, step
from torch_attnkit.integrations.transformers.joined import joined_class

OP = "rope_kv_cache_append"
KIND = joined_class(modeling_gpt_oss.GptOssAttention)
LAYERS, PROMPT, CAPACITY = 2, 5, 32


class _Layer(StaticLayer):
    """Somebody's own."""


def model(dtype: torch.dtype = torch.float32) -> Any:
    return frozen(attnkit_model(build("gpt_oss"), experts="mxfp4")).to(dtype)


def steps(call: Any, cache: Any, ids: torch.Tensor, cuts: list[tuple[int, int]], padded: bool = False) -> list[Any]:
    """Logits of the tokens ``ids`` (B, n), in pieces as ``cuts`` says."""
    found, mask = [], torch.ones(ids.shape, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    for a, b in cuts:
        with torch.no_grad():
            given = dict(attention_mask=mask[:, :b]) if padded else {}
            found.append(call(ids[:, a:b], past_key_values=cache, **given).logits)
    return found


def decoding(n: int) -> list[tuple[int, int]]:
    return [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, n))]


def ran(call: Any, cache: Any, ids: torch.Tensor, cuts: list[tuple[int, int]], **kwargs: Any) -> int:
    with torch_attnkit.record() as record:
        steps(call, cache, ids, cuts, **kwargs)
    return sum(count for (op, _), count in record.calls.items() if op == OP)


def same(a: StaticCache, b: StaticCache) -> None:
    for x, y in zip(a.layers, b.layers, strict=True):
        assert torch.equal(x.keys, y.keys) and torch.equal(x.values, y.values)
        assert torch.equal(x.cumulative_length, y.cumulative_length)
        assert getattr(x, "cumulative_length_int", 0) == getattr(y, "cumulative_length_int", 0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_and_caches_are_those_of_the_models_own_forward(batch, padded, monkeypatch):
    """Bit by bit, until long after the window of 8 is full; then three tokens at once, and one."""
    ours, ids = model(), tokens(batch, 24)
    cuts = decoding(20) if padded else [*decoding(20), (20, 23), (23, 24)]
    caches = [StaticCache(ours.config, max_cache_len=CAPACITY) for _ in range(2)]
    got = steps(ours, caches[0], ids, cuts, padded)
    assert ran(ours, StaticCache(ours.config, max_cache_len=CAPACITY), ids, cuts, padded=padded) >= 15 * LAYERS
    monkeypatch.setattr(KIND, "attnkit_step", None)
    want = steps(ours, caches[1], ids, cuts, padded)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    same(*caches)


def test_a_compiled_step_takes_it_as_one_graph(monkeypatch):
    torch._dynamo.reset()
    ours, ids = model(), tokens(2, 20)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    caches = [StaticCache(ours.config, max_cache_len=CAPACITY) for _ in range(2)]
    got = steps(compiled, caches[0], ids, decoding(20))
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum(OP in target for target in targets) == LAYERS * (counter.frame_count - 1)
    monkeypatch.setattr(KIND, "attnkit_step", None)
    want = steps(ours, caches[1], ids, decoding(20))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    same(*caches)


def test_what_does_not_fit_runs_the_models_own_forward(monkeypatch):
    ours, ids = model(), tokens(2, 9)
    static = lambda **kwargs: StaticCache(ours.config, max_cache_len=CAPACITY, **kwargs)
    assert ran(ours, static(), ids, decoding(9)) == 4 * LAYERS
    assert ran(ours, DynamicCache(config=ours.config), ids, decoding(9)) == 0
    assert ran(ours, static(), ids, [(0, 5), (5, 9)]) == 0
    own = static()
    own.layers[1].__class__ = _Layer
    assert ran(ours, own, ids, decoding(9)) == 4
    subclass = static()
    subclass.__class__ = type("Mine", (StaticCache,), {})
    assert ran(ours, subclass, ids, decoding(9)) == 0
    monkeypatch.setattr(modeling_gpt_oss, "apply_rotary_pos_emb", lambda *args: step._ROTATE(*args))
    assert ran(ours, static(), ids, decoding(9)) == 0


def test_whoever_wants_gradients_gets_the_models_own_forward():
    ours, ids = model(), tokens(2, 7)
    attention = modules(ours, "GptOssAttention")[0]
    attention.sinks.requires_grad_(True)
    cache = StaticCache(ours.config, max_cache_len=CAPACITY)
    with torch_attnkit.record() as record:
        for a, b in decoding(7):
            ours(ids[:, a:b], past_key_values=cache)
    assert sum(count for (op, _), count in record.calls.items() if op == OP) <= 2 * (LAYERS - 1)


def test_generating_over_a_static_cache_gives_the_tokens_of_a_dynamic_one():
    ours, ids = model(), tokens(2, 6)
    found = []
    for kind in ("static", "dynamic"):
        with torch_attnkit.record() as record:
            options = dict(max_new_tokens=12, do_sample=False, disable_compile=True, cache_implementation=kind)
            found.append(ours.generate(ids, **options))
        assert any(op == OP for op, _ in record.calls) == (kind == "static")
    assert torch.equal(*found)


def test_layers_that_the_step_knows_are_those_of_a_static_cache():
    cache = StaticCache(model().config, max_cache_len=CAPACITY)
    assert [type(layer) for layer in cache.layers] == [StaticSlidingWindowLayer, StaticLayer]


# Products of few tokens.


@pytest.mark.simulator
@pytest.mark.seconds(300)
def test_products_of_few_tokens_are_the_ops_where_it_has_a_row():
    pytest.importorskip("cutlass", reason="needs the CuTeDSL compiler")
    gen = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=gen).bfloat16() for s in ((2, 1, 64), (48, 64)))
    calls = {
        "bfloat16": (x, weight),
        "float32": (x.float(), weight.float()),
        "17 tokens": (torch.randn(17, 64, generator=gen).bfloat16(), weight),
        "a K of 40": (x[..., :40], weight[:, :40]),
        "columns": (x, torch.randn(64, 48, generator=gen).bfloat16().T),
        "gradients": (x, weight.clone().requires_grad_()),
    }
    for name, (a, b) in calls.items():
        with torch_attnkit.simulate("sm90"), torch_attnkit.record() as record:
            got = products.linear(a, b)
        assert bool(record.calls) == (name == "bfloat16"), name
        got, want = got.detach(), torch.nn.functional.linear(a, b).detach()
        assert got.shape == want.shape
        # Two roundings to the dtype, each of half an eps at most, and those of sums in float32, which are far smaller.
        assert float((got - want).abs().max()) <= 2 * torch.finfo(a.dtype).eps * float(want.abs().max()), name
    with torch_attnkit.record() as record:
        products.linear(x, weight)
    assert not record.calls
