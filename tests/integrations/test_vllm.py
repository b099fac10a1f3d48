"""The vLLM plugin as far as it goes without vLLM: views of its cache, steps as calls, refusals, and registering.

``make vllm`` runs vLLM itself.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import torch_attnkit
from tests.targets import needs
from torch_attnkit import UnsupportedError
from torch_attnkit.core import Target, invariance
from torch_attnkit.integrations import vllm as plugin
from torch_attnkit.integrations.vllm import choice, cpu, interfaces, steps
from torch_attnkit.oracle.compare import check

ROOT = Path(__file__).resolve().parents[2]
NAN = float("nan")


def empty_cache(pages: int, heads: int, page: int, dim: int, dtype=torch.float32) -> torch.Tensor:
    """A layer's cache as vLLM allocates it in the layout LBNHC, logically (Np, Hkv, Ps, 2D), full of NaN, in bytes of
    those of E4M3."""
    nan = 0x7F if dtype is torch.uint8 else NAN
    return torch.full((pages, page, heads, 2 * dim), nan, dtype=dtype).transpose(1, 2)


class Batch:
    """Requests with ``past`` and ``new`` tokens, their keys and values, and pages in any order."""

    def __init__(self, past: list[int], new: list[int], *, heads=(4, 2), page=16, dim=32, dtype=torch.float32):
        self.lengths, self.new, self.page = [p + n for p, n in zip(past, new, strict=True)], new, page
        self.table = torch.full((len(new), 1 + max(self.lengths) // page), 10**6, dtype=torch.int32)
        free = iter(torch.randperm(3 + self.table.numel()).tolist())
        for row, n in zip(self.table, self.lengths, strict=True):
            for j in range(-(-n // page)):
                row[j] = next(free)
        self.cache = empty_cache(3 + self.table.numel(), heads[1], page, dim, dtype)
        self.k, self.v = ([torch.randn(n, heads[1], dim).to(dtype) for n in self.lengths] for _ in "kv")
        self.q = torch.randn(sum(new), heads[0], dim).to(dtype)
        for b, n in enumerate(past):
            steps.store(self.k[b][:n], self.v[b][:n], self.cache, self.slots(b, 0, n))
        steps.store(
            torch.cat([k[n:] for k, n in zip(self.k, past, strict=True)]),
            torch.cat([v[n:] for v, n in zip(self.v, past, strict=True)]),
            self.cache,
            torch.cat([self.slots(b, n, self.lengths[b]) for b, n in enumerate(past)]),
        )
        offsets = torch.tensor([0, *new], dtype=torch.int32).cumsum(0)
        self.step = steps.Step.of(
            sum(new), offsets, self.table, torch.tensor(self.lengths, dtype=torch.int32), max(new), max(self.lengths)
        )

    def slots(self, b: int, first: int, last: int) -> torch.Tensor:
        key = torch.arange(first, last)
        return self.table[b, key // self.page].long() * self.page + key % self.page

    def expected(self, sink=None, **options) -> torch.Tensor:
        """Each request alone, over its keys without pages."""
        queries = zip(self.q.split(self.new), self.k, self.v, strict=True)
        return torch.cat([
            torch.ops.attnkit.flash_attention(q[None], k[None], v[None], sink, causal=True, **options)[0][0]
            for q, k, v in queries
        ])  # fmt: skip


def attended(layer: steps.Layer, step: steps.Step, q, cache, sink=None, *, decode=True) -> torch.Tensor:
    """``steps.attend`` into a tensor with something before it and behind it."""
    held = torch.full((q.shape[0] + 2, *q.shape[1:]), NAN, dtype=q.dtype)
    steps.attend(layer, step, q, cache, sink, held[1:-1], decode=decode)
    assert held[[0, -1]].isnan().all()
    return held[1:-1]


def layer_of(batch: Batch, **more) -> steps.Layer:
    k, _ = steps.halves(batch.cache)
    return steps.Layer(batch.q.shape[1], k.shape[2], k.shape[3], batch.q.dtype, k.dtype, batch.page, **more)


def test_a_token_goes_where_its_slot_says_and_nowhere_else():
    cache = empty_cache(5, 2, 16, 8)
    key, value = torch.randn(2, 6, 2, 8)
    slots = torch.tensor([79, 3, -1, 16, 40])  # the sixth token pads the batch
    steps.store(key, value, cache, slots)
    k, v = steps.halves(cache)
    assert k.shape == (5, 16, 2, 8) and k.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(k[slot // 16, slot % 16], key[t]) and torch.equal(v[slot // 16, slot % 16], value[t])
    assert int(cache.isfinite().sum()) == 4 * 2 * 16


def test_pages_may_have_heads_outside_tokens():
    cache = torch.full((5, 2, 16, 16), NAN)
    key, value = torch.randn(2, 1, 2, 8)
    steps.store(key, value, cache, torch.tensor([35]))
    assert torch.equal(cache[2, :, 3], torch.cat([key[0], value[0]], -1)) and int(cache.isfinite().sum()) == 2 * 16


@pytest.mark.parametrize(
    "past, new",
    [([0, 0], [17, 40]), ([30, 9, 0, 64], [20, 1, 5, 1]), ([30, 9, 0], [1, 1, 1])],
    ids=["prompts", "mixed", "single tokens"],
)
@pytest.mark.parametrize("more", [{}, {"window": 7, "softcap": 3.0, "scale": 0.5}])
def test_a_step_equals_each_request_alone(past, new, more):
    batch = Batch(past, new)
    sink = torch.randn(4)
    layer = layer_of(batch, sink=True, **more)
    with torch_attnkit.record() as ran:
        out = attended(layer, batch.step, batch.q, batch.cache, sink, decode=True)
    op = steps.SINGLE if max(new) == 1 else steps.MIXED
    assert [name for name, _ in ran.calls] == [f"{op}_out"]
    expected = batch.expected(sink, **layer.options)
    torch.testing.assert_close(out, expected)
    again = attended(layer, batch.step, batch.q, batch.cache, sink, decode=False)
    torch.testing.assert_close(again, expected)


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{}, {"window": 24}])
def test_a_request_has_the_same_bits_in_every_step(more):
    """The 64th token of a request: alone, among single tokens, among prompts, and in its own prompt, whole and cut."""
    needs("sm90")
    with torch_attnkit.simulate("sm90"), torch_attnkit.batch_invariant():
        batch = Batch([63, 130, 16, 63, 0, 9], [1, 1, 1, 1, 1, 1], dim=64, dtype=torch.bfloat16)
        layer = layer_of(batch, **more)
        decode = steps.supports_decode(layer, Target("sm90"))
        assert not decode
        single = attended(layer, batch.step, batch.q, batch.cache, decode=decode)[0]
        table = batch.table[:1]
        rest = torch.randn(63, 4, 64).bfloat16()  # queries of the tokens before

        def step(new: list[int], tables: torch.Tensor, lengths: list[int]) -> steps.Step:
            offsets = torch.tensor([0, *new]).cumsum(0)
            return steps.Step.of(sum(new), offsets, tables, torch.tensor(lengths), max(new), max(lengths))

        alone = attended(layer, step([1], table, [64]), batch.q[:1], batch.cache, decode=decode)[0]
        prompt = attended(layer, step([64], table, [64]), torch.cat([rest, batch.q[:1]]), batch.cache)[-1]
        chunk = torch.cat([batch.q[1:2], rest[-6:], batch.q[:1]])
        mixed = attended(layer, step([1, 7], batch.table[[1, 0]], [131, 64]), chunk, batch.cache)[-1]
        for other in (alone, prompt, mixed):
            assert torch.equal(single.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("scale", [[1.5], [0.5, 2.0]], ids=["tensor", "head"])
@pytest.mark.parametrize(("past", "new"), [([30, 9, 17], [1, 1, 1]), ([30, 0, 17], [5, 9, 1])], ids=["single", "mixed"])
def test_a_step_over_e4m3_is_attention_of_what_is_stored(past, new, scale, dtype):
    """Keys and values are stored divided by their scales; queries stay what they are."""
    torch.manual_seed(0)
    by = {name: factor * torch.tensor(scale) for name, factor in (("k", 1.0), ("v", 3.0))}

    def meant(x: torch.Tensor, name: str) -> torch.Tensor:  # (T, H, D) as E4M3 holds it
        heads = by[name].repeat_interleave(x.shape[1] // len(scale))[:, None]
        return (x.float() / heads).to(steps.E4M3).float() * heads

    scales = steps.Scales.of(tuple(by.values()), 5, 2)
    batch = Batch(past, new, dtype=dtype)
    batch.cache = empty_cache(batch.cache.shape[0], 2, batch.page, 32, torch.uint8)
    for b, n in enumerate(batch.lengths):
        steps.store(batch.k[b], batch.v[b], batch.cache, batch.slots(b, 0, n), scales)
    layer = layer_of(batch)
    assert layer.fp8 and layer.dtype is dtype
    held = torch.full_like(batch.q, NAN)
    steps.attend(layer, batch.step, batch.q, batch.cache, None, held, decode=True, scales=scales)
    batch.k, batch.v = ([meant(x, name) for x in given] for name, given in (("k", batch.k), ("v", batch.v)))
    batch.q = batch.q.float()
    bound = 2**-8 if dtype is torch.bfloat16 else 1e-5  # one rounding of the result
    torch.testing.assert_close(held.float(), batch.expected(), rtol=bound, atol=1e-5)


def test_what_pads_a_batch_has_no_result_and_reads_nothing():
    """vLLM's tensors are longer than the batch, and a request that pads it has no query and a length of 0."""
    batch = Batch([30, 9], [1, 1])
    table = torch.cat([batch.table, torch.full_like(batch.table, -7)])
    for offsets, tokens in ([0, 1, 2, 2], 2), ([0, 1, 2, 2], 3):
        step = steps.Step.of(tokens, torch.tensor(offsets), table, torch.tensor([31, 10, 0, 0]), 1, 500)
        assert step.kv_len.tolist() == [31, 10, 0] and step.block_table.shape[0] == 3
        assert step.single == (tokens == 3)
        q = torch.cat([batch.q, batch.q[:1]])[:tokens]
        out = attended(layer_of(batch), step, q, batch.cache)
        torch.testing.assert_close(out[:2], batch.expected())
        assert not out[2:].any()


def test_lengths_are_bounded_by_powers_of_two_so_that_a_plan_serves_many_steps():
    one = torch.zeros(1, dtype=torch.int32)
    found = {
        steps.Step.of(1, torch.tensor([0, 1]), one[None], one, longest, longest).max_seqlen_k
        for longest in range(513, 1025)
    }
    assert found == {1024}
    assert steps.Step.of(1, torch.tensor([0, 1]), one[None], one, 1, 1).single
    assert not steps.Step.of(2, torch.tensor([0, 2]), one[None], one, 2, 2).single


@pytest.mark.simulator
@pytest.mark.proof
@pytest.mark.parametrize("past, new", [([30, 9], [20, 1]), ([30, 9], [1, 1])], ids=["mixed", "single tokens"])
def test_the_hopper_kernels_take_views_of_the_cache(past, new):
    batch = Batch(past, new, dim=64, dtype=torch.bfloat16)
    with torch_attnkit.simulate("sm90"):
        out = attended(layer_of(batch), batch.step, batch.q, batch.cache)
    expected = batch.expected()
    batch.q, batch.k, batch.v = batch.q.double(), [k.double() for k in batch.k], [v.double() for v in batch.v]
    check("out", out, expected, batch.expected())


def test_a_step_to_capture_reads_vllms_own_memory_and_is_bounded_by_the_model():
    batch = Batch([30, 9], [1, 1])
    given = (batch.step.cu_seqlens_q, batch.table, batch.step.kv_len)
    step = steps.Step.of(2, *given, 1, 31).to_capture(given, 3000)
    assert step.max_seqlen_k == 4096 and step.single
    tensors = (step.cu_seqlens_q, step.block_table, step.kv_len)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors, given, strict=True))
    long = (*given[:2], given[2].long())
    with pytest.raises(UnsupportedError, match="seq_lens is torch.int64 where a CUDA graph is captured"):
        steps.Step.of(2, *long, 1, 31).to_capture(long, 3000)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_captured_step_serves_other_lengths_and_tables(drafts):
    """What a CUDA graph does: the calls of one step again, with new contents in the same tensors. Unused pages hold
    NaN, and the last request pads the batch."""
    new = 1 + drafts
    first, then = Batch([30, 9, 55], [new] * 3), Batch([2, 44, 17], [new] * 3)
    requests, width = 4, max(first.table.shape[1], then.table.shape[1])
    table = torch.zeros(requests, width, dtype=torch.int32)
    kv_len, offsets = torch.zeros(requests, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
    cache = torch.full_like(max(first.cache, then.cache, key=torch.numel), NAN)
    q, out = torch.zeros(requests * new, 4, 32), torch.zeros(requests * new, 4, 32)
    step, layer = None, layer_of(first, sink=True, window=21)
    sink = torch.randn(4)
    for batch in (first, then):
        table.zero_()[:3, : batch.table.shape[1]] = batch.table.masked_fill(batch.table == 10**6, 0)
        kv_len[:3], offsets[:] = batch.step.kv_len, torch.tensor([0, 1, 2, 3, 3]) * new
        cache.fill_(NAN)[: batch.cache.shape[0]] = batch.cache
        q[: 3 * new], q[3 * new :] = batch.q, NAN
        out.fill_(NAN)
        step = step or steps.Step.of(requests * new, offsets, table, kv_len, new, 1).to_capture(
            (offsets, table, kv_len), 256
        )
        steps.attend(layer, step, q, cache, sink, out, decode=True)
        torch.testing.assert_close(out[: 3 * new], batch.expected(sink, **layer.options))
        assert not out[3 * new :].any()


def test_the_table_says_which_layers_run():
    def word(op=steps.MIXED, on="sm90", **changes):
        given = dict(heads=8, kv_heads=1, dim=128, dtype=torch.bfloat16, cache_dtype=torch.bfloat16, page=16) | changes
        return steps.refusal(op, steps.Layer(**given), Target(on))

    assert word() is None and word(op=steps.SINGLE) is None
    assert word(window=128, softcap=30.0, sink=True, dim=64) is None
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds a model in bf16
    try:
        assert word(sink=True, dim=64) is None and word(op=steps.SINGLE, sink=True, dim=64) is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert "D=80" in word(dim=80) and "sm90" in word(dim=80)
    assert "f32" in word(dtype=torch.float32, cache_dtype=torch.float32)
    for op in (steps.MIXED, steps.SINGLE):
        for target in ("sm80", "sm89", "sm90", "sm100", "sm120", "cpu"):
            assert word(op=op, cache_dtype=steps.E4M3, on=target) is None
    assert "D=512" in word(cache_dtype=steps.E4M3, on="sm90", dim=512)
    assert "Ps must be a multiple of 16" in word(op=steps.SINGLE, page=8)
    assert word(on="cpu", dim=80, dtype=torch.float32, cache_dtype=torch.float32) is None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The few names of vLLM that ``register`` uses, in modules of their own."""
    overrides: dict[enum.Enum, str] = {}
    refused: list[str] = []

    class AttentionBackendEnum(enum.Enum):
        CPU_ATTN, CUSTOM = "theirs", None

        def is_overridden(self):
            return self in overrides

        def get_path(self):
            return overrides.get(self, self.value)

        def get_class(self):
            return SimpleNamespace(validate_configuration=lambda **config: refused)

    class CpuPlatform:
        def is_cpu(self):
            return True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            return f"theirs for {selected_backend}, {num_heads} heads"

    registry = dict(AttentionBackendEnum=AttentionBackendEnum, register_backend=overrides.__setitem__)
    quantizations: dict[str, type] = {}

    def register_quantization_config(name):
        return lambda config: quantizations.setdefault(name, config)

    layers = "vllm.model_executor.layers"

    class AttentionImpl:
        def forward(
            self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
        ):
            """Called by vLLM."""

    class AttentionMetadataBuilder:
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            """Called by vLLM."""

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            """Called by vLLM."""

        def build_for_cudagraph_capture(self, common_attn_metadata):
            """Called by vLLM."""

    fields = "query_start_loc block_table_tensor seq_lens num_actual_tokens max_query_len max_seq_len causal more"
    backend = dict(
        AttentionImpl=AttentionImpl, AttentionMetadataBuilder=AttentionMetadataBuilder,
        CommonAttentionMetadata=dataclasses.make_dataclass("CommonAttentionMetadata", fields.split()),
        **dict.fromkeys(("AttentionBackend", "AttentionCGSupport", "AttentionType", "MultipleOf"), object),
    )  # fmt: skip
    contents = {
        "vllm": dict(__version__="0.32.0+cpu"),
        "vllm.v1.attention.backend": backend,
        "vllm.v1.kv_cache_layout": dict(KVCacheLayout=object),
        "vllm.envs": dict(VLLM_BATCH_INVARIANT=False),
        "vllm.platforms": dict(current_platform=CpuPlatform()),
        "vllm.platforms.cpu": dict(CpuPlatform=CpuPlatform),
        "vllm.v1.attention.backends.registry": registry,
        f"{layers}.quantization": dict(register_quantization_config=register_quantization_config),
        f"{layers}.quantization.base_config": dict(QuantizationConfig=object),
    }
    packages = ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.model_executor", layers)

    def put(name, **values):
        module = ModuleType(name)
        module.__dict__.update(values, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)

    for name, values in (contents | {p: {} for p in packages}).items():
        put(name, **values)
    monkeypatch.delitem(sys.modules, f"{plugin.__name__}.quantization", raising=False)
    monkeypatch.delattr(plugin, "quantization", raising=False)
    yield SimpleNamespace(
        overrides=overrides, refused=refused, choice=AttentionBackendEnum, cpu=CpuPlatform, quantizations=quantizations,
        put=put,
    )  # fmt: skip
    sys.modules.pop(f"{plugin.__name__}.quantization", None)


def test_registering_makes_custom_ours_and_again_changes_nothing(vllm):
    for _ in range(2):
        plugin.register()
    assert vllm.overrides == {vllm.choice.CUSTOM: plugin.BACKEND}
    config = SimpleNamespace(_asdict=lambda: dict(head_size=64))
    assert vllm.cpu.get_attn_backend_cls(vllm.choice.CUSTOM, config) == plugin.BACKEND
    theirs = vllm.cpu.get_attn_backend_cls(None, config, 4)
    assert theirs == "theirs for None, 4 heads"
    vllm.refused.append("no such head size")
    with pytest.raises(ValueError, match="CUSTOM is not valid .*no such head size"):
        vllm.cpu.get_attn_backend_cls(vllm.choice.CUSTOM, config)
    assert "CPU_ATTN" in vllm.cpu.get_attn_backend_cls(vllm.choice.CPU_ATTN, config)


@pytest.mark.parametrize("asked", [True, False])
def test_registering_takes_batch_invariance_from_vllm(vllm, asked):
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = asked
    try:
        plugin.register()
        assert invariance.is_on() == asked
    finally:
        torch_attnkit.set_batch_invariant(False)


@pytest.mark.parametrize("model, name", [(None, "AttnkitBackend"), (False, "AttnkitBackend"), (True, "LatentBackend")])
def test_custom_is_what_the_model_asks_for(vllm, model, name, monkeypatch):
    config = SimpleNamespace(model_config=None if model is None else SimpleNamespace(use_mla=model))
    vllm.put("vllm.config", get_current_vllm_config_or_none=lambda: config)
    found = type("Found", (), {})
    home = f"{plugin.__name__}.{'mla' if model else 'backend'}"
    vllm.put(home, **{name: found})
    assert choice.Backend is found
    with pytest.raises(AttributeError, match="Other"):
        choice.Other  # noqa: B018


def test_a_vllm_that_lacks_what_mla_needs_still_gets_custom(vllm):
    plugin.register()
    assert vllm.overrides == {vllm.choice.CUSTOM: plugin.BACKEND}
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    vllm.put("vllm.config", get_current_vllm_config_or_none=lambda: config)
    with pytest.raises(ImportError, match="lacks what attnkit's MLA is written against: .*layers.attention"):
        choice.Backend  # noqa: B018


def takes(arguments: str):
    """A function with these arguments, behind self."""

    def function(*args):
        """Called by vLLM, or by us."""

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in ("self", *arguments.split())])  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    "owner, name, word",
    [
        ("", "QueryLenSupport", "mla_attention.QueryLenSupport"),
        ("MLACommonPrefillMetadata.ContextChunk", "max_seq_len", "MLACommonPrefillMetadata.ContextChunk.max_seq_len"),
        ("MLACommonImpl", "forward_mqa", "MLACommonImpl.forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)"),
        ("MLAPrefillBackend", "__init__", "MLAPrefillBackend.__init__(num_heads, scale, kv_lora_rank,"),
    ],
)
def test_mla_needs_names_fields_and_arguments(vllm, owner, name, word):
    wanted = interfaces.MLA
    modules = {home: {n: type(n, (), {}) for n in names.split()} for home, names in wanted.names.items()}
    for (home, path), names in wanted.fields.items():
        *outer, last = path.split(".")
        fields = [n for n in names.split() if (path, n) != (owner, name)]
        made = dataclasses.make_dataclass(last, fields)
        setattr(modules[home][outer[0]], last, made) if outer else modules[home].__setitem__(last, made)
    for (home, path), names in wanted.called.items():
        cls, method = path.split(".")
        setattr(modules[home][cls], method, takes("q" if (cls, method) == (owner, name) else names))
    for home, contents in modules.items():
        vllm.put(home, **{n: value for n, value in contents.items() if owner or n != name})
    (found,) = interfaces.missing(wanted)
    assert word in found


def test_mxfp4_experts_are_ours_only_where_they_are_asked_for(vllm):
    plugin.register()
    assert list(vllm.quantizations) == ["attnkit_mxfp4", "attnkit_nvfp4"]
    name, config = next(iter(vllm.quantizations.items()))
    model, published = SimpleNamespace(model_type="gpt_oss"), {"quant_method": "mxfp4"}
    assert config.override_quantization_method(published, name, hf_config=model) == name == "attnkit_mxfp4"
    for others in (
        (published, None, model), (published, "mxfp4", model), ({"quant_method": "fp8"}, name, model),
        (published, name, SimpleNamespace(model_type="llama")), (None, name, None),
    ):  # fmt: skip
        assert config.override_quantization_method(*others) is None


def test_nvfp4_experts_are_ours_only_where_they_are_asked_for(vllm):
    plugin.register()
    name, config = list(vllm.quantizations.items())[1]
    found, legacy = {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quantization": {"quant_algo": "NVFP4"}}
    for published in (found, {"quant_method": "modelopt_fp4"} | legacy):
        assert config.override_quantization_method(published, name) == name
    for others in (
        (found, None), (found, "modelopt_fp4"), (found | {"quant_algo": "FP8"}, name), (None, name),
        ({"quant_method": "mxfp4"}, name),
    ):  # fmt: skip
        assert config.override_quantization_method(*others) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_another_version_with_these_interfaces_is_taken(vllm, version, caplog):
    sys.modules["vllm"].__version__ = version
    with caplog.at_level(logging.INFO, "vllm.torch_attnkit"):
        plugin.register()
    assert vllm.overrides and f"vLLM {version} has the interfaces of" in caplog.text


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda m: m.pop("AttentionCGSupport"), "vllm.v1.attention.backend.AttentionCGSupport"),
        (lambda m: m.update(CommonAttentionMetadata=dataclasses.make_dataclass("M", ["seq_lens"])), "max_query_len"),
        (
            lambda m: setattr(m["AttentionImpl"], "forward", lambda self, layer, query: None),
            r"AttentionImpl.forward(layer, query, key, value, kv_cache, attn_metadata, output,",
        ),
    ],
)
def test_other_interfaces_are_named_and_left_alone(vllm, change, word, caplog):
    change(vars(sys.modules["vllm.v1.attention.backend"]))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert not vllm.overrides and "lacks what the plugin is written against" in caplog.text and word in caplog.text


def test_a_backend_that_another_plugin_registered_stays(vllm, caplog):
    vllm.overrides[vllm.choice.CUSTOM] = "another.Backend"
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert vllm.overrides == {vllm.choice.CUSTOM: "another.Backend"} and "already another.Backend" in caplog.text


def test_a_vllm_that_lacks_what_is_needed_is_told_of(vllm, caplog):
    del sys.modules["vllm.v1.attention.backends.registry"].register_backend
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert not vllm.overrides and not vllm.quantizations and "registry.register_backend" in caplog.text


def test_without_vllm_registering_only_warns(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "vLLM cannot be imported" in caplog.text


def test_the_entry_point_names_register_and_the_backend_stands_where_it_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["torch_attnkit"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register
    assert plugin.BACKEND == f"{choice.__name__}.Backend"
    assert cpu.__name__.startswith(plugin.__name__)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm120"])
def test_gpus_without_wgmma_serve_latents_and_caches_of_e4m3(arch):
    target = Target(arch)
    latent = steps.LatentLayer(16, 512, 64, 128, 128, torch.bfloat16, torch.bfloat16, page=64)
    assert steps.refusal_of_latents(latent, target) is None
    layer = steps.Layer(64, 8, 64, torch.bfloat16, torch.float8_e4m3fn, page=16, window=-1, softcap=0.0, sink=True)
    assert steps.refusal(steps.SINGLE, layer, target) is None and steps.supports_decode(layer, target)
    assert steps.refusal(steps.MIXED, layer, target) is None
