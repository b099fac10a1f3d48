"""Steps of vLLM's MLA layers as calls of ops, without vLLM: latents in pages, decode, prompts and cached context.

``make vllm`` runs vLLM itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import torch_attnkit
from torch_attnkit.core import Target
from torch_attnkit.integrations.vllm import steps
from torch_attnkit.oracle.compare import check

NAN = float("nan")
RANK, ROPE, NOPE, VALUE, HEADS, PAGE = 48, 16, 32, 24, 3, 16
SCALE = 0.2


def layer_of(**changes) -> steps.LatentLayer:
    given = dict(
        heads=HEADS, rank=RANK, rope=ROPE, nope=NOPE, value=VALUE, dtype=torch.float32, cache_dtype=torch.float32,
        page=PAGE, scale=SCALE,
    )  # fmt: skip
    return steps.LatentLayer(**(given | changes))


class Cache:
    """Rows of requests with ``lengths`` tokens, in pages in any order. All else holds NaN, and entries of the table
    behind a length point nowhere."""

    def __init__(self, lengths: list[int], *, rank=RANK, rope=ROPE, dtype=torch.float32, spare: int = 3):
        self.rows = [torch.randn(n, rank + rope).to(dtype) for n in lengths]
        self.table = torch.full((len(lengths), 1 + max(lengths, default=0) // PAGE), 10**6, dtype=torch.int32)
        self.kv_len = torch.tensor(lengths, dtype=torch.int32)
        pages = self.table.numel() + spare
        free = iter(torch.randperm(pages).tolist())
        for row, n in zip(self.table, lengths, strict=True):
            for j in range(-(-n // PAGE)):
                row[j] = next(free)
        self.memory = torch.full((pages, PAGE, rank + rope), NAN, dtype=dtype)
        for b, rows in enumerate(self.rows):
            steps.store_latents(rows[:, :rank], rows[:, None, rank:], self.memory, self.slots(b, 0, len(rows)))

    def slots(self, b: int, first: int, last: int) -> torch.Tensor:
        key = torch.arange(first, last)
        return self.table[b, key // PAGE].long() * PAGE + key % PAGE

    def gathered(self, b: int, first: int, last: int) -> torch.Tensor:
        """Rows of request b as the cache has them."""
        return self.memory.flatten(0, 1)[self.slots(b, first, last)]


def attention(q, k, v, hidden=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention in float64 of q (T, H, D) over k (S, H, D) and v (S, H, Dv): out and LSE."""
    scores = torch.einsum("thd,shd->ths", q.double(), k.double()) * SCALE
    if hidden is not None:
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("ths,shd->thd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def decoded(q: torch.Tensor, rows: torch.Tensor, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """A query (H, rank + rope) over rows (S, rank + rope)."""
    k = rows[:, None].expand(-1, q.shape[0], -1)
    out, lse = attention(q[None], k, k[..., :rank])
    return out[0], lse[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_token_becomes_the_row_that_its_slot_names_and_no_other():
    memory = torch.full((5, PAGE, RANK + ROPE), NAN)
    product = torch.randn(6, 7 + RANK + ROPE)  # latent and key are columns of a product, which vLLM norms and rotates
    latent, k_rope = product[:, 7 : 7 + RANK], product[:, None, 7 + RANK :]
    slots = torch.tensor([79, 3, -1, 16, 40])  # the sixth token pads the batch
    steps.store_latents(latent, k_rope, memory, slots)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(memory[slot // PAGE, slot % PAGE], product[t, 7:])
    assert int(memory.isfinite().sum()) == 4 * (RANK + ROPE)


def test_keys_and_values_are_the_same_memory():
    memory = torch.zeros(5, PAGE, RANK + ROPE)
    k, v = steps.latents(memory, RANK)
    assert k.shape == (5, PAGE, 1, RANK + ROPE) and v.shape == (5, PAGE, 1, RANK)
    assert k.data_ptr() == v.data_ptr() == memory.data_ptr() and k.stride() == v.stride()


@pytest.mark.parametrize("each", [1, 4])
def test_every_token_of_a_request_sees_the_rows_up_to_its_own(each):
    cache = Cache([33, 4, 70])
    q = torch.randn(3 * each, HEADS, RANK + ROPE)
    with torch_attnkit.record() as ran:
        rows = steps.token_rows(cache.table, cache.kv_len, each)
        out, lse = steps.decode_latents(layer_of(), q, cache.memory, *rows)
    assert [name for name, _ in ran.calls] == [steps.SINGLE]
    assert (rows[0] is cache.table) == (each == 1)
    for t in range(3 * each):
        b = t // each
        seen = len(cache.rows[b]) - each + 1 + t % each
        want, want_lse = decoded(q[t], cache.rows[b][:seen])
        close(out[t], want)
        close(lse[t], want_lse)


@pytest.mark.parametrize("each", [1, 3])
def test_the_same_tensors_serve_other_lengths_and_tables(each):
    """What a CUDA graph does: the calls again with new contents. The last request pads the batch: its length is 0."""
    first, then = Cache([33, 4, 70]), Cache([5, 90, 17])
    width, pages = (max(getattr(c, n).shape[at] for c in (first, then)) for n, at in (("table", 1), ("memory", 0)))
    table, kv_len = torch.zeros(4, width, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    memory, q = torch.empty(pages, PAGE, RANK + ROPE), torch.empty(4 * each, HEADS, RANK + ROPE)
    for cache in (first, then):
        table.fill_(10**6)[:3, : cache.table.shape[1]] = cache.table
        kv_len[:3] = cache.kv_len
        memory.fill_(NAN)[: cache.memory.shape[0]] = cache.memory
        q.normal_()
        out, lse = steps.decode_latents(layer_of(), q, memory, *steps.token_rows(table, kv_len, each))
        for t in range(3 * each):
            b = t // each
            close(out[t], decoded(q[t], cache.rows[b][: len(cache.rows[b]) - each + 1 + t % each])[0])
        assert not out[3 * each :].any() and lse[3 * each :].eq(-torch.inf).all()


def test_shares_of_the_rows_merge_by_the_natural_lse():
    """Decode context parallelism: each process has every other row, one of them none of the second request's."""
    whole = Cache([41, 1])
    q = torch.randn(2, HEADS, RANK + ROPE)
    parts = []
    for rank in range(2):
        share = Cache([len(rows[rank::2]) for rows in whole.rows])
        for b, rows in enumerate(whole.rows):
            local = rows[rank::2]
            steps.store_latents(local[:, :RANK], local[:, None, RANK:], share.memory, share.slots(b, 0, len(local)))
        parts.append(steps.decode_latents(layer_of(), q, share.memory, share.table, share.kv_len))
    out, lse = (torch.stack(t) for t in zip(*parts, strict=True))
    assert lse[1, 1].eq(-torch.inf).all()
    merged = (out * (lse - lse.logsumexp(0)).exp()[..., None]).sum(0)
    for b in range(2):
        close(merged[b], decoded(q[b], whole.rows[b])[0])


def heads_of(rows: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (S, H, nope + rope) and values (S, H, value) that a layer makes of rows; values are columns of a product."""
    both = (rows[:, :RANK] @ up).unflatten(1, (HEADS, NOPE + VALUE))
    k_rope = rows[:, None, RANK:].expand(-1, HEADS, -1)
    return torch.cat([both[..., :NOPE], k_rope], -1), both[..., NOPE:]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def joined(parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = zip(*parts, strict=True)
    widths = k[0].shape[-1], v[0].shape[-1]
    # As vLLM has it: values lie beside something else.
    both = torch.cat([torch.cat(k), torch.cat(v)], -1).split(widths, -1)
    return torch.cat(k), both[1]


@pytest.mark.parametrize("past, new", [([0, 0], [17, 40]), ([30, 9, 64], [20, 1, 5])], ids=["prompts", "suffixes"])
def test_prompts_and_cached_context_equal_plain_attention(past, new):
    """The tokens of a step among themselves, those cached before them apart, merged by their LSEs."""
    cache = Cache([p + n for p, n in zip(past, new, strict=True)])
    up = torch.randn(RANK, HEADS * (NOPE + VALUE)) * RANK**-0.5
    q = torch.randn(sum(new), HEADS, NOPE + ROPE)
    k, v = joined(heads_of(rows[p:], up) for rows, p in zip(cache.rows, past, strict=True))
    packed = steps.Packed(offsets(new), offsets(new), max(new), max(new))
    with torch_attnkit.record() as ran:
        out, lse = steps.attend_packed(q, k, v, packed, scale=SCALE, causal=True)
        if any(past):
            k, v = joined(heads_of(cache.gathered(b, 0, n), up) for b, n in enumerate(past))
            packed = steps.Packed(offsets(new), offsets(past), max(new), max(past))
            before, before_lse = steps.attend_packed(q, k, v, packed, scale=SCALE, causal=False)
            whole = torch.logaddexp(lse, before_lse)
            out = out * (lse - whole).exp()[..., None] + before * (before_lse - whole).exp()[..., None]
            lse = whole
    assert {name for name, _ in ran.calls} == {steps.PROMPTS}
    for b, queries in enumerate(q.split(new)):
        key = torch.arange(past[b] + new[b])
        hidden = key > past[b] + torch.arange(new[b])[:, None]
        want, want_lse = attention(queries, *heads_of(cache.rows[b], up), hidden)
        at = slice(sum(new[:b]), sum(new[: b + 1]))
        close(out[at], want)
        close(lse[at], want_lse)


def test_a_request_without_context_among_others_has_no_part_in_the_merge():
    packed = steps.Packed(offsets([2, 3]), offsets([0, 5]), 3, 5)
    q, k = torch.randn(5, HEADS, NOPE + ROPE), torch.randn(5, HEADS, NOPE + ROPE)
    out, lse = steps.attend_packed(q, k, k[..., :VALUE], packed, scale=SCALE, causal=False)
    assert not out[:2].any() and lse[:2].eq(-torch.inf).all() and lse[2:].isfinite().all()


def test_bounds_of_prompts_are_powers_of_two_so_that_a_plan_serves_many_steps(monkeypatch):
    found = set()

    def flash_attention_varlen(*args, max_seqlen_q, max_seqlen_k, **options):
        found.add((max_seqlen_q, max_seqlen_k))
        return args[:3]

    monkeypatch.setattr(steps, "ops", SimpleNamespace(flash_attention_varlen=flash_attention_varlen))
    q, cu = torch.empty(1, HEADS, NOPE + ROPE), offsets([1])
    for longest in range(513, 1025):
        steps.attend_packed(q, q, q, steps.Packed(cu, cu, longest - 512, longest), scale=SCALE, causal=True)
    assert found == {(1 << n, 1024) for n in range(10)}


def test_the_table_says_which_latents_run():
    bf16 = torch.bfloat16
    real = dict(heads=16, rank=512, rope=64, nope=128, value=128, dtype=bf16, cache_dtype=bf16, page=64)

    def word(on="sm90", prompts=True, **changes):
        return steps.refusal_of_latents(layer_of(**(real | changes)), Target(on), prompts=prompts)

    for on in ("sm90", "sm100"):
        assert word(on) is None and word(on, page=16, heads=128) is None
        assert word(on, dtype=torch.float16, cache_dtype=torch.float16) is None
        assert "f32" in word(on, dtype=torch.float32, cache_dtype=torch.float32)
        assert "the caches must have the dtype of q" in word(on, cache_dtype=torch.float8_e4m3fn)
        assert "D=320" in word(on, rank=256)
        assert "D=160" in word(on, nope=96) and word(on, nope=96, prompts=False) is None
    assert "Ps must be a multiple of 16" in word(page=8)
    assert word("cpu", rank=256, nope=96, dtype=torch.float32, cache_dtype=torch.float32) is None


@pytest.mark.simulator
@pytest.mark.proof
@pytest.mark.parametrize("each", [1, 2])
def test_the_hopper_kernel_takes_views_of_the_cache(each):
    cache = Cache([33, 20], rank=512, rope=64, dtype=torch.bfloat16)
    q = torch.randn(2 * each, 4, 576).bfloat16()
    rows = steps.token_rows(cache.table, cache.kv_len, each)
    layer = layer_of(heads=4, rank=512, rope=64, scale=192**-0.5)
    with torch_attnkit.simulate("sm90"):
        out, _ = steps.decode_latents(layer, q, cache.memory, *rows)
    expected, _ = steps.decode_latents(layer, q, cache.memory, *rows)
    k = [cache.rows[t // each][: int(n)].double() for t, n in enumerate(rows[1])]
    exact = torch.stack([
        torch.softmax(q[t].double() @ k[t].T * layer.scale, -1) @ k[t][:, :512] for t in range(2 * each)
    ])  # fmt: skip
    check("out", out, expected, exact)
