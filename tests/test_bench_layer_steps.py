"""The steps of DeepSeek-V4's attention beside the kernels that serve them, on a CPU: inputs, what the composed layer
hands over, judged by plain stand-ins for its kernels, and what is said of steps that fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import torch_attnkit
from bench import layer_inputs, layer_steps, layers, models, run, timing
from bench.layer_inputs import Shape, made, shape_of
from bench.peers import deepgemm, flashmla, vllm_cache, vllm_ops
from bench.same import difference
from tests.test_bench_dsv4 import chosen, mqa_logits, paged_mqa_logits, sparse_decode, sparse_prefill
from tests.test_bench_dsv4 import made as call_of
from torch_attnkit.formats import kv_cache, rope

DECODE = dict(kind="csa", batch=3, tokens=1, context=256, rate=4, topk=20)
PREFILL = dict(kind="csa", batch=1, tokens=150, context=90, rate=4, topk=32)
SHAPES = [
    Shape(**DECODE),
    Shape(**DECODE | dict(kind="hca")),
    Shape(**DECODE | dict(kind="window", rate=0, batch=2)),
    Shape(**DECODE | dict(batch=34, heads=128)),
    Shape(**PREFILL),
    Shape(**PREFILL | dict(context=0)),
    Shape(**PREFILL | dict(kind="hca", context=0)),
    Shape(**PREFILL | dict(kind="window", rate=0)),
]
IDS = [f"{s.kind}, {s.name}" for s in SHAPES]


def rotated(x, angles):
    cos, sin = angles.split(angles.shape[1] // 2, 1)
    shape = (len(x), *(1,) * (x.dim() - 2), -1)
    return rope.apply(x, cos.view(shape), sin.view(shape), interleaved=True)


def normed(q, eps):
    return q.float() * (q.float().square().mean(-1, keepdim=True) + eps).rsqrt()


def insert(q, kv, cache, slot, position, angles, heads, eps, page):
    assert cache.shape[1] == 64 * 584 and cache.stride() == (65 * 576, 1) and page == 64 and heads == q.shape[1]
    assert slot.dtype == position.dtype == torch.int64 and angles.dtype == torch.float32
    rows = kv_cache.encode_rows(rotated(kv, angles[position]), "fp8", 64)
    for row, at in zip(rows, slot.tolist(), strict=True):
        offset = at % 64
        cache[at // 64, offset * 576 : (offset + 1) * 576] = row[:576]
        cache[at // 64, 64 * 576 + offset * 8 : 64 * 576 + (offset + 1) * 8] = row[576:]
    return rotated(normed(q, eps), angles[position]).to(q.dtype)


def insert_values(q, kv, cache, slot, position, angles, eps, page):
    assert cache.shape[1:] == (64, 512) and cache.is_contiguous() and page == 64
    cache.view(-1, 512)[slot] = rotated(kv, angles[position])
    q.copy_(rotated(normed(q, eps), angles[position]))


def per_row(scores, first, lengths, out, rows, across, along, K):
    assert (rows, across, along) == (len(scores), *scores.stride()) and first.dtype == lengths.dtype == torch.int32
    out.fill_(-1)
    chosen(scores, lengths, out, K)


def shared(scores, lengths, out, workspace, K, most):
    assert most == scores.shape[1] and int(lengths.max()) <= most
    chosen(scores, lengths, out, K)


@pytest.fixture
def kernels(monkeypatch):
    """All that the composed layer calls; a test may replace one."""
    general = SimpleNamespace(
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert=insert, top_k_per_row_prefill=per_row,
        fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert=insert_values, cooperative_topk=shared,
        persistent_topk=shared,
    )  # fmt: skip
    deep = SimpleNamespace(
        fp8_mqa_logits=mqa_logits, fp8_paged_mqa_logits=paged_mqa_logits, get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=lambda lengths, page, sms: "plan",
    )  # fmt: skip
    flash = SimpleNamespace(sparse_prefill_fwd=sparse_prefill, sparse_decode_fwd=sparse_decode)
    monkeypatch.setattr(vllm_ops, "general", lambda: general)
    monkeypatch.setattr(deepgemm, "library", lambda: deep)
    monkeypatch.setattr(flashmla, "library", lambda: flash)
    return SimpleNamespace(general=general, deep=deep, flash=flash)


def fails(*args):
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.sample(3)
@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_both_sides_take_the_same_steps(shape, kernels):
    v = layer_steps.judged(shape, made(shape, "cpu"))
    assert not v.wrong and not v.missing
    steps = ("write", "choose", "attend") if shape.chooses else ("write", "attend")
    assert v.steps(shape) == steps and set(v.found) == {*steps, "all"}
    assert all(len(offs) == 2 for offs in v.found.values())  # of either side


@torch.no_grad()
@pytest.mark.parametrize("fmt", [0, 1])
def test_the_op_of_the_first_step_has_the_fused_kernel_for_a_peer(fmt, kernels):
    sizes = dict(Tq=5, Hq=2, D=512, Nc=128, rope=64, full=1)
    args, kwargs, wanted = call_of("rope_kv_cache_write", sizes | dict(fmt=fmt))
    call = vllm_cache.adapt("rope_kv_cache_write", args, kwargs)
    # Sums of 512 squares in float32 move a rounding to bf16 in 512 2^-16 of the elements, by 2^-7 of one at most.
    assert difference("rope_kv_cache_write", args, wanted, call()) <= 2.0**-7 * (512 * 2.0**-16) ** 0.5
    assert vllm_cache.adapt("rope_kv_cache_write", args, kwargs | dict(format="nvfp4")) is None
    assert vllm_cache.adapt("rope_kv_cache_write", (args[0].half(), *args[1:]), kwargs) is None


def elsewhere(q, kv, cache, slot, *others):
    return insert(q, kv, cache, slot.flip(0), *others)


def unrotated(q, kv, cache, slot, position, angles, heads, eps, page):
    return insert(q, kv, cache, slot, position * 0, angles, heads, eps, page)


def worst(scores, lengths, out, workspace, K, most):
    shared(-scores, lengths, out, workspace, K, most)


def others_entries(q, pages, weights, lengths, table, *others):
    return paged_mqa_logits(q, pages, weights, lengths, table.flip(0), *others)


def no_sink(q, kv, index, seen, sink, *others):
    return sparse_decode(q, kv, index, seen, None, *others)


def window_alone(q, kv, index, seen, sink, plan, splits, kv2, index2, seen2, *others):
    return sparse_decode(q, kv, index, seen, sink, plan, splits, None, None, None, *others)


WRITE = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
FAULTS = [
    ("write", "general", WRITE, fails), ("write", "general", WRITE, elsewhere), ("write", "general", WRITE, unrotated),
    ("choose", "general", "cooperative_topk", fails), ("choose", "general", "cooperative_topk", worst),
    ("choose", "deep", "fp8_paged_mqa_logits", others_entries), ("attend", "flash", "sparse_decode_fwd", fails),
    ("attend", "flash", "sparse_decode_fwd", no_sink), ("attend", "flash", "sparse_decode_fwd", window_alone),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("step", "library", "name", "fault"), FAULTS)
def test_a_step_that_fails_or_is_wrong_is_missing_and_the_others_stay(step, library, name, fault, kernels):
    setattr(getattr(kernels, library), name, fault)
    shape = Shape(**DECODE)
    v = layer_steps.judged(shape, made(shape, "cpu"))
    assert not v.wrong and list(v.missing) == [step]
    assert v.steps(shape) == tuple(other for other in ("write", "choose", "attend") if other != step)
    reason = "RuntimeError: no kernel image" if fault is fails else "computes something else (difference "
    assert v.missing[step].startswith(reason)


class Shifted(layer_steps.Ours):
    """Ours with a fault in one step."""

    fault = ""

    def write(self):
        q = super().write()
        return q + 0.1 * (self.fault == "write")

    def choose(self):
        return super().choose() if self.fault != "choose" else super().choose().roll(1, 0)

    def attend(self, q, chosen):
        args, kwargs = self.attention(q, chosen)
        narrow = dict(window=100) if self.fault == "attend" else {}
        return torch.ops.attnkit.sparse_fmha_with_swa(*args, **kwargs | narrow)[0]


@torch.no_grad()
@pytest.mark.parametrize("fault", ("write", "choose", "attend"))
def test_a_fault_of_ours_is_found(fault, kernels, monkeypatch):
    monkeypatch.setattr(layer_steps, "Ours", Shifted)
    monkeypatch.setattr(Shifted, "fault", fault)
    shape = Shape(**DECODE)
    v = layer_steps.judged(shape, made(shape, "cpu"))
    assert fault in v.wrong, v


@torch.no_grad()
@pytest.mark.parametrize("shape", [Shape(**DECODE), Shape(**PREFILL)], ids=("decode", "prefill"))
def test_steps_together_give_what_they_give_one_by_one(shape, kernels):
    given = made(shape, "cpu")
    copy = given.copy()
    assert copy.angles is given.angles and copy.q is not given.q and torch.equal(copy.q, given.q)
    for side in layer_steps.sides(shape, given):
        q, chosen = side.write().clone(), side.choose().clone()
        out = side.attend(q, chosen)
        before = layer_steps.Before(q, side.entries(chosen))
        assert torch.equal(layer_steps.jointly(side, ("choose", "attend"), before)(), out)
        assert torch.equal(layer_steps.jointly(side, ("attend",), before)(), out)
        assert torch.equal(layer_steps.jointly(side, ("choose",), before)(), chosen)
        assert layer_steps.jointly(side, ("write", "attend"), before)().shape == out.shape
    again = layer_steps.sides(shape, copy)
    whole = [layer_steps.jointly(side, ("write", "choose", "attend"), before)() for side in again]
    assert layer_steps._off(whole[1], whole[0].double()) < run._SAME


@torch.no_grad()
def test_steps_are_timed_on_both_sides_and_printed(kernels, monkeypatch, capsys):
    """What needs a GPU is replaced: graphs, their time, launches, and how many inputs the cache holds."""
    shape = Shape(**DECODE)
    on_cpu = layer_inputs.made
    monkeypatch.setattr(layer_steps, "made", lambda shape, device: on_cpu(shape, "cpu"))
    monkeypatch.setattr(layer_steps, "_sets", lambda shape, given, steps: 3 - len(steps) // 2)
    monkeypatch.setattr(layer_steps, "_captured", lambda calls: ([call() for call in calls], ""))
    monkeypatch.setattr(layer_steps, "_launches", lambda call: "5")
    monkeypatch.setattr(timing, "interleaved", lambda runs: [10.0 * len(each) for each in runs])
    monkeypatch.setattr(models.console, "_width", 500)
    kernels.flash.sparse_decode_fwd = fails
    title, kept = "DeepSeek-V4-Flash, csa", sparse_decode
    assert layers.composed([(title, shape)], 0) == 0
    message = capsys.readouterr().out
    assert "attend of the composed layer is missing: RuntimeError: no kernel image" in message
    assert "write + choose: ours 20.0 us in 5 launches, composed 20.0 us in 5; composed / ours 1.00" in message
    kernels.flash.sparse_decode_fwd = kept
    assert layers.composed([(title, shape)], 0) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(f"{title}, {shape.name}: right: q and rows off")
    groups = ["write + choose + attend", "choose + attend", "write", "choose", "attend"]
    assert [line.split(":")[0] for line in lines[1:6]] == groups
    row = next(line for line in lines if line.startswith(f"│ {title}, {shape.name}"))
    cells = [cell.strip() for cell in row.strip("│").split("│")][1:]
    assert cells == [groups[0], "20.0 / 20.0, 1.00", "5 / 5", "20.0 / 20.0, 1.00", *["30.0 / 30.0, 1.00"] * 3]


def test_a_call_fits_what_the_kernels_take():
    for kind in layers.KINDS:
        settings = layers.layer_config("pro", kind)
        shape = shape_of(settings, kind, 32, 1, 131072)
        assert (shape.heads, shape.dim, shape.rope, shape.topk, shape.row) == (128, 512, 64, 1024, 584)
        assert shape.entries == dict(window=0, csa=32768, hca=1024)[kind]
    with pytest.raises(ValueError, match="whole pages of 64"):
        Shape(**DECODE | dict(context=200))
    with pytest.raises(ValueError, match="as many as are chosen"):
        Shape(**DECODE | dict(topk=65))
    with pytest.raises(ValueError, match="one sequence"):
        Shape(**PREFILL | dict(batch=2))


_SMALL = dict(heads=4, dim=128, rope=64, window=16, topk=20, index_heads=4, index_dim=64)
SIMULATED = [
    Shape("csa", 3, 1, 256, rate=4, **_SMALL), Shape("hca", 2, 1, 256, rate=4, **_SMALL),
    Shape("csa", 1, 50, 40, rate=4, **_SMALL), Shape("window", 1, 50, 40, **_SMALL),
]  # fmt: skip


@pytest.mark.simulator
@torch.no_grad()
@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", SIMULATED, ids=[f"{s.kind}, {s.name}" for s in SIMULATED])
def test_our_steps_are_right_on_simulated_kernels_of_hopper(shape):
    pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")
    given = made(shape, "cpu")
    exact, ours = layer_steps.Exact(shape, given), layer_steps.Ours(shape, given)
    with torch_attnkit.simulate("sm90"), torch_attnkit.record() as recorded:
        q, chosen = ours.write(), ours.choose() if shape.chooses else None
        out = ours.attend(q, chosen)
    assert {on for _, on in recorded.calls} == {"sm90 (simulated)"}
    assert sum(recorded.calls.values()) == (3 if shape.chooses else 2)
    assert exact.write(ours, q) < run._SAME and exact.attend(ours, q, chosen, out) <= 1
    assert chosen is None or exact.choose(chosen) == 0
    assert exact.all(ours, chosen, out) < run._SAME


@pytest.mark.seconds(240)
@pytest.mark.proof
@torch.no_grad()
def test_the_kernels_of_the_steps_are_found_without_data():
    cases = list(layers._cases("1,128", 4096, 131072))
    shapes = [
        shape_of(layers.layer_config("flash", kind), kind, c.batch, c.tokens, c.context)
        for kind in layers.KINDS
        for c in cases
    ]
    found = layer_steps.kernels(shapes, "sm90")
    assert {r.family for r in found} == {"cache", "sparse", "indexer", "topk"}
