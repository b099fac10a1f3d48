"""The attention of a DeepSeek-V4 layer composed by hand of the kernels that serve it today.

| step | decode: rows of FP8 in pages | prefill: rows of bfloat16 |
|---|---|---|
| write | vLLM's fused norm and rotation of q, rotation of keys and row write | the same, of bfloat16 rows |
| choose | DeepGEMM's paged logits, vLLM's top-k of a step, an addition | its logits, vLLM's top-k per row, a copy |
| attend | FlashMLA's decode kernel on two caches | its prefill kernel on one tensor |

What vLLM does once for all layers of a step is made before: lists of the window's rows and of all entries, lengths, the
schedules of DeepGEMM and FlashMLA. Entries become rows of the cache by one launch of torch's: pages follow one another
here, so that it is an addition, or, in a prefill, a copy into lists that windows and entries share; vLLM has a Triton
kernel in either place.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.layer_inputs import PAGE, Inputs, Shape
from bench.peers import deepgemm, flashmla, vllm_ops, vllm_topk

_EPS = 1e-6
_CODES = 576  # bytes of a row without its scales


def adapt(shape: Shape, given: Inputs) -> Decode | Prefill:
    return Decode(shape, given) if shape.decode else Prefill(shape, given)


class Decode:
    """A step over caches of its own, in the layout that FlashMLA and DeepGEMM read."""

    def __init__(self, shape: Shape, given: Inputs) -> None:
        self.shape, self.given = shape, given
        self.near = flashmla.paged(given.near.flatten(0, 1))  # (Np, 64, 1, 584)
        self.far = None if given.far is None else flashmla.paged(given.far.flatten(0, 1))
        seen = _lists(shape, given)
        self.near_index, self.near_count = flashmla.packed(seen.index[0], PAGE)
        self.first = (given.request(shape) * shape.entries).int()[:, None]  # (T, 1): where a sequence's rows begin
        self.rows: torch.Tensor | None = None  # (T, K): the rows of entries that each token attends
        if shape.chooses:
            self.rows = torch.empty(shape.queries, shape.topk, dtype=torch.int32, device=given.q.device)
            self.far_count = torch.full_like(given.end, shape.topk)
        elif self.far is not None:
            self.rows, self.far_count = flashmla.packed(seen.index[1], PAGE)
        # Schedules, which are made for all layers of a step.
        self._choice: Any = None
        self._plan: Any = None

    def write(self) -> torch.Tensor:
        """q (T, H, D), normed and rotated; a row of each new key into the cache."""
        g, s = self.given, self.shape
        run = vllm_ops.general().fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        q: torch.Tensor = run(g.q, g.kv, _bytes(self.near), g.slot, g.position, g.angles, s.heads, _EPS, PAGE)
        return q

    def choose(self) -> torch.Tensor:
        """The rows that each token attends (T, K)."""
        if self._choice is None:
            g, kernel = self.given, vllm_topk.of_few(self.shape.queries)
            pages = deepgemm.pages(g.index_k, g.index_scale, None)
            scores = deepgemm.of_pages(g.index_q, *pages, g.weights, g.visible)
            self._choice = scores, vllm_topk.shared(kernel, g.visible, self.shape.topk)
        scores, largest = self._choice
        return self.listed(largest(scores()))

    def listed(self, chosen: torch.Tensor) -> torch.Tensor:
        """Entries of a sequence (T, K) as rows of the cache."""
        return torch.add(chosen, self.first, out=self.rows)

    def entries(self, listed: torch.Tensor) -> torch.Tensor:
        """Its inverse, for who compares."""
        return listed - self.first

    def attend(self, q: torch.Tensor, listed: torch.Tensor | None) -> torch.Tensor:
        if self._plan is None:
            self._plan = self._attend(q, listed, None, None)[1]
        return self._attend(q, listed, *self._plan)[0]

    def written(self, slot: torch.Tensor) -> torch.Tensor:
        """Rows (T, 584) of the window's cache, as kv_cache_write lays them out."""
        pages, codes = _bytes(self.near), PAGE * _CODES
        parts = pages[:, :codes].unflatten(1, (PAGE, -1)), pages[:, codes:].unflatten(1, (PAGE, -1))
        return torch.cat([part[slot // PAGE, slot % PAGE] for part in parts], 1)

    def _attend(
        self, q: torch.Tensor, listed: torch.Tensor | None, plan: Any, splits: Any
    ) -> tuple[torch.Tensor, list[Any]]:
        s, rows = self.shape, self.rows if listed is None else listed
        far = (None, None, None) if rows is None else (self.far, rows[:, None], self.far_count)
        near = self.near, self.near_index[:, None], self.near_count
        run, out = flashmla.library().sparse_decode_fwd, torch.empty_like(q)
        _, _, *schedule = run(q[:, None], *near, self.given.sink, plan, splits, *far, s.dim, s.dim**-0.5, out[:, None])
        return out, schedule


class Prefill:
    """One sequence whose entries, padded to whole pages, and window lie behind one another in one tensor."""

    def __init__(self, shape: Shape, given: Inputs) -> None:
        self.shape, self.given = shape, given
        self.q = given.q.clone()  # vLLM's kernel norms and rotates in place
        far = given.near[0, :0] if given.far is None else given.far[0]
        far = torch.nn.functional.pad(far, (0, 0, 0, -len(far) % PAGE))
        self.kv = torch.cat((far, given.near[0]))  # (N, D)
        self.behind = len(far)  # where the window begins
        self.slot = given.slot + self.behind
        near, *others = _lists(shape, given).index
        near = torch.where(near < 0, -1, near + self.behind)
        limit = torch.full_like(given.end, near.shape[1])
        if given.visible is not None:
            limit = limit + (given.visible.clamp(max=shape.topk) if shape.chooses else given.visible)
        if shape.chooses:
            self.first = torch.zeros_like(given.end)
            self.chosen = torch.full((shape.queries, shape.topk), -1, dtype=torch.int32, device=near.device)
            others = [self.chosen]
        self.columns = slice(near.shape[1], near.shape[1] + shape.topk)
        index = torch.cat((near, *others), 1).int()
        self.index = torch.nn.functional.pad(index, (0, -index.shape[1] % flashmla.PREFILL_STEP), value=-1)
        self.limit = limit.int()  # (T,): places of the list, behind which nothing counts; -1 is passed over

    def write(self) -> torch.Tensor:
        g = self.given
        run = vllm_ops.general().fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert
        run(self.q, g.kv, self.kv.view(-1, PAGE, self.shape.dim), self.slot, g.position, g.angles, _EPS, PAGE)
        return self.q

    def choose(self) -> torch.Tensor:
        """Lists of rows (T, n), windows first; of a sequence's entries rows are numbers of entries."""
        g, K = self.given, self.shape.topk
        keys = g.index_k[0], g.index_scale[0, :, 0]  # type: ignore[index]
        scores = deepgemm.library().fp8_mqa_logits(g.index_q, keys, g.weights, self.first, g.visible, False)
        run, strides = vllm_ops.general().top_k_per_row_prefill, (scores.stride(0), scores.stride(1))
        run(scores, self.first, g.visible, self.chosen, len(scores), *strides, K)
        return self.listed(self.chosen)

    def listed(self, chosen: torch.Tensor) -> torch.Tensor:
        self.index[:, self.columns].copy_(chosen)
        return self.index

    def entries(self, listed: torch.Tensor) -> torch.Tensor:
        return listed[:, self.columns]

    def attend(self, q: torch.Tensor, listed: torch.Tensor | None) -> torch.Tensor:
        index, dim, out = self.index if listed is None else listed, self.shape.dim, torch.empty_like(q)
        run = flashmla.library().sparse_prefill_fwd
        run(q, self.kv[:, None], index[:, None], dim**-0.5, dim, self.given.sink, self.limit, out)
        return out

    def written(self, slot: torch.Tensor) -> torch.Tensor:
        return self.kv[slot + self.behind]


def _lists(shape: Shape, given: Inputs) -> flashmla.Lists:
    """The rows of all windows that each token sees, and, where none are chosen, of all entries."""
    far = None if shape.chooses else given.far
    limit = None if far is None else given.visible
    return flashmla.lists((given.q, given.near, given.end, far, None, limit), shape.window)


def _bytes(pages: torch.Tensor) -> torch.Tensor:
    """Pages (Np, 64, 1, 584) as they lie (Np, 64 * 584)."""
    return pages.as_strided((len(pages), PAGE * pages.shape[3]), (pages.stride(0), 1))
