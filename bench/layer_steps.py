"""The steps of a DeepSeek-V4 layer's attention on the ops, beside the kernels that serve them today.

| step | computes | on the ops |
|---|---|---|
| write | q normed and rotated, keys rotated, their rows in the window's cache | ``rope_kv_cache_write`` |
| choose | the entries that each token attends, of layers with an indexer | ``indexer_select`` |
| attend | attention over window and entries | ``sparse_fmha_with_swa`` |

``peers/composed_layer.py`` composes the same of vLLM's, DeepGEMM's and FlashMLA's kernels. Outside of both:
projections, norms of their results, rotation and quantisation of the indexer's q, the compressor (no entry gets
complete), the rotation back and the output projections.

Results come first. q and rows are compared with float64; choices are exact up to ties, since scores are; attention of
ours, over what the steps before gave, keeps the tolerance of parity; and what all steps of a side give together is at
most 2 % of its norm away from float64 over what that side chose. A step of the composed layer that fails or computes
something else is named with its reason and left out on both sides. Then those that are left, in one CUDA graph, and
each by itself, take turns with the other side's, each on so many inputs that it finds them cold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Column, Table
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import models, run, timing
from bench.layer_inputs import PAGE, Inputs, Shape, made
from bench.peers import composed_layer
from bench.same import difference
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.formats import kv_cache, rope
from torch_attnkit.oracle.compare import check
from torch_attnkit.parity.judge import reference_of
from torch_attnkit.warmup import asked_by

ops = torch.ops.attnkit
_EPS = 1e-6
_JUDGED = 64  # tokens whose results are looked at, evenly spread


class Ours:
    """The ops, over caches in pages where it is a decode step."""

    def __init__(self, shape: Shape, given: Inputs) -> None:
        self.shape, self.given = shape, given
        half = shape.rope // 2
        self.angles = given.angles[given.position].split((half, half), 1)  # what the model makes once for all layers
        self.near, self.near_table = self._paged(given.near)
        self.far, self.far_table = (None, None) if given.far is None else self._paged(given.far)
        self.index_k, self.index_table = self._paged(given.index_k)
        self.index_scale, _ = self._paged(given.index_scale)
        self.limit = None if shape.decode and not shape.chooses else given.visible

    def write(self) -> torch.Tensor:
        """q (T, H, D), normed and rotated; a row of each new key into the cache."""
        g, s = self.given, self.shape
        rows = g.near.flatten(0, 1)
        kwargs = dict(eps=_EPS, format=s.format, rope_dim=s.rope)
        q: torch.Tensor = ops.rope_kv_cache_write(g.q, g.kv, rows, g.slot, *self.angles, **kwargs)
        return q

    def choose(self) -> torch.Tensor:
        """Entries (T, K)."""
        g = self.given
        keys = self.index_k, g.weights, g.visible, None, self.index_table, None, self.index_scale
        chosen: torch.Tensor = ops.indexer_select(g.index_q, *keys, format="fp8", topk=self.shape.topk)
        return chosen

    def attend(self, q: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        args, kwargs = self.attention(q, chosen)
        out: torch.Tensor = ops.sparse_fmha_with_swa(*args, **kwargs)[0]
        return out

    def attention(self, q: torch.Tensor, chosen: torch.Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of sparse_fmha_with_swa."""
        g, s = self.given, self.shape
        tables = self.near_table, self.far_table
        args = (q, self.near, g.end, self.far, chosen, self.limit, None, g.sink, *tables)
        return args, dict(scale=s.dim**-0.5, window=s.window, format=s.format, rope_dim=s.rope)

    def written(self, slot: torch.Tensor) -> torch.Tensor:
        """Rows (T, Rb) of the window's cache."""
        return self.given.near.flatten(0, 1)[slot]

    def listed(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen

    entries = listed

    def _paged(self, rows: torch.Tensor | None) -> tuple[Any, Any]:
        """Rows (R, S, n) as pages (Np, 64, n) that follow one another, and the table (R, M)."""
        if rows is None or not self.shape.decode:
            return rows, None
        pages = rows.view(-1, PAGE, rows.shape[2])
        return pages, torch.arange(len(pages), dtype=torch.int32, device=rows.device).view(len(rows), -1)


Side = Ours | composed_layer.Decode | composed_layer.Prefill


def steps_of(shape: Shape) -> tuple[str, ...]:
    return ("write", "choose", "attend") if shape.chooses else ("write", "attend")


@dataclass(frozen=True)
class Before:
    """What a step gets where the one before it is left out."""

    q: torch.Tensor
    chosen: torch.Tensor | None  # entries

    def copy(self) -> Before:
        return Before(self.q.clone(), None if self.chosen is None else self.chosen.clone())


def jointly(side: Side, steps: tuple[str, ...], before: Before) -> Callable[[], Any]:
    """All of ``steps``, each on what the one before it gave."""
    listed = None if before.chosen is None else side.listed(before.chosen).clone()

    def call() -> Any:
        q = side.write() if "write" in steps else before.q
        chosen = side.choose() if "choose" in steps else listed
        return side.attend(q, chosen) if "attend" in steps else chosen if "choose" in steps else q

    return call


def sides(shape: Shape, given: Inputs) -> tuple[Ours, Side]:
    """Both on the same numbers."""
    return Ours(shape, given), composed_layer.adapt(shape, given)


# Judging.


class Exact:
    """What the steps compute, in float64, of tokens evenly spread."""

    def __init__(self, shape: Shape, given: Inputs) -> None:
        self.shape, self.given = shape, given
        count = min(_JUDGED, shape.queries)
        self.tokens = torch.linspace(0, shape.queries - 1, count, device=given.q.device).long()
        self.request = given.request(shape)[self.tokens].int()
        half = shape.rope // 2
        cos, sin = given.angles[given.position].double().split((half, half), 1)  # (T, pairs) each
        q, kv = given.q[self.tokens].double(), given.kv.double()
        q = q * (q.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        self.q = rope.apply(q, cos[self.tokens, None], sin[self.tokens, None], interleaved=True)
        rows = kv_cache.encode_rows(rope.apply(kv, cos, sin, interleaved=True).bfloat16(), shape.format, shape.rope)
        self.near = given.near.clone()
        self.near.view(-1, shape.row)[given.slot] = rows
        self.rows = self._decoded(rows[self.tokens])
        scores = self._scores() if shape.chooses else torch.empty(count, 0)  # (t, C)
        best, order = scores.sort(descending=True, stable=True)
        self.scores, self.chosen = scores, order.masked_fill(best == -torch.inf, -1)[:, : shape.topk].int()

    def write(self, side: Side, q: torch.Tensor) -> float:
        """How far q, or the rows that were written, are off."""
        rows = self._decoded(side.written(self.given.slot[self.tokens]))
        return max(_off(q[self.tokens], self.q), _off(rows, self.rows))

    def choose(self, chosen: torch.Tensor) -> float:
        """The share of tokens whose choice is not one of the largest scores."""
        return difference("indexer_topk", (self.scores,), self.chosen, chosen[self.tokens])

    def attend(self, ours: Ours, q: torch.Tensor, chosen: torch.Tensor | None, out: torch.Tensor) -> float:
        """Our error as a fraction of parity's tolerance. Raises AssertionError where it is beyond."""
        args, kwargs = self._attention(ours, q[self.tokens], chosen)
        op = OPS["sparse_fmha_with_swa"]
        results = (reference_of(op, args, kwargs, double=double)[0] for double in (False, True))
        return check("sparse_fmha_with_swa out", out[self.tokens], *results)

    def all(self, ours: Ours, chosen: torch.Tensor | None, out: torch.Tensor) -> float:
        """How far all steps together are off, over the entries that were chosen."""
        (q, near, *others), kwargs = self._attention(ours, self.q, chosen)
        args = (q, self.near.view(near.shape), *others)
        exact = reference_of(OPS["sparse_fmha_with_swa"], args, kwargs, double=True)[0]
        return _off(out[self.tokens], exact)

    def _attention(
        self, ours: Ours, q: torch.Tensor, chosen: torch.Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for these tokens alone, of which q (t, H, D) is; chosen (T, K) is of all."""
        (_, near, end, far, _, limit, _, sink, *tables), kwargs = ours.attention(q, chosen)
        limit, chosen = (None if t is None else t[self.tokens] for t in (limit, chosen))
        return (q, near, end[self.tokens], far, chosen, limit, self.request, sink, *tables), kwargs

    def _decoded(self, rows: torch.Tensor) -> torch.Tensor:
        return kv_cache.decode_rows(rows, self.shape.format, self.shape.dim, self.shape.rope, dtype=torch.float64)

    def _scores(self) -> torch.Tensor:
        """Of the indexer (t, C), in float32, in which these numbers are exact."""
        g, scores = self.given, []
        for token, request in zip(self.tokens.tolist(), self.request.tolist(), strict=True):
            products = (g.index_q[token].float() @ g.index_k[request].float().T).relu()  # (Hi, C)
            scores.append(g.weights[token] @ products * g.index_scale[request, :, 0])
        masked = torch.arange(self.shape.entries, device=g.q.device) >= g.visible[self.tokens, None]
        return torch.stack(scores).masked_fill(masked, -torch.inf)


def _off(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@dataclass
class Verdict:
    """What was seen of both sides."""

    before: Before
    wrong: dict[str, str] = field(default_factory=dict)  # steps of ours, and why
    missing: dict[str, str] = field(default_factory=dict)  # steps of the composed layer, and why
    found: dict[str, list[float]] = field(default_factory=dict)  # of each step: ours, theirs

    def add(self, step: str, off: float, most: float, ours: bool) -> None:
        self.found.setdefault(step, []).append(off)
        if not off <= most:
            (self.wrong if ours else self.missing)[step] = f"computes something else (difference {off:.2g})"

    def steps(self, shape: Shape) -> tuple[str, ...]:
        return tuple(step for step in steps_of(shape) if step not in self.missing)

    def __str__(self) -> str:
        names = {"write": "q and rows off", "choose": "tokens of another choice", "attend": "attention off (ours of"
                 " parity's tolerance, composed from ours)", "all": "all off"}  # fmt: skip
        return "; ".join(
            f"{names[step]} " + ", ".join(f"{off:.2g}" for off in offs) for step, offs in self.found.items()
        )


def judged(shape: Shape, given: Inputs) -> Verdict:
    """Both sides on the same numbers, of which rows are written thereafter."""
    exact, (ours, theirs) = Exact(shape, given), sides(shape, given)
    v = Verdict(Before(ours.write(), ours.choose() if shape.chooses else None))
    q, chosen = v.before.q, v.before.chosen
    out = ours.attend(q, chosen)
    v.add("write", exact.write(ours, q), run._SAME, True)
    if chosen is not None:
        v.add("choose", exact.choose(chosen), 0, True)
    try:
        v.add("attend", exact.attend(ours, q, chosen, out), 1, True)
    except AssertionError as failure:
        v.wrong["attend"] = str(failure)
    v.add("all", exact.all(ours, chosen, out), run._SAME, True)
    _judge_composed(v, exact, ours, theirs, out)
    return v


def _judge_composed(v: Verdict, exact: Exact, ours: Ours, theirs: Side, out: torch.Tensor) -> None:
    """Step by step on what ours gave, then all on what the composed steps gave, as far as there are any."""
    q, chosen, shape = v.before.q, v.before.chosen, ours.shape
    listed = own = None if chosen is None else theirs.listed(chosen).clone()

    def attempt(step: str, of: Callable[[], tuple[Any, float]], most: float) -> Any:
        try:
            result, off = of()
            v.add(step, off, most, False)
            return result
        except Exception as failure:  # a kernel of others may fail in any way; that is named, and the bench goes on
            v.missing[step] = run._message(failure)
            return None

    def write() -> tuple[torch.Tensor, float]:
        written = theirs.write()
        return written, exact.write(theirs, written)

    def choose() -> tuple[torch.Tensor, float]:
        rows = theirs.choose()
        return rows, exact.choose(theirs.entries(rows))

    def attend() -> tuple[torch.Tensor, float]:
        result = theirs.attend(q, listed)
        return result, _off(result, out.double())

    def everything() -> tuple[None, float]:
        entries = None if own is None else theirs.entries(own)
        return None, exact.all(ours, entries, theirs.attend(our_args, own))

    our_args = attempt("write", write, run._SAME)
    if "write" in v.missing:  # its cache gets the rows that ours wrote
        our_args, theirs = q, composed_layer.adapt(shape, ours.given)
    if shape.chooses:
        rows = attempt("choose", choose, 0)
        own = listed if "choose" in v.missing else rows
    attempt("attend", attend, run._SAME)
    if "attend" not in v.missing:
        attempt("all", everything, run._SAME)


# Timing.


@dataclass(frozen=True)
class Row:
    """Microseconds and launches of some steps: ours, the composed layer's."""

    name: str
    steps: tuple[str, ...]
    us: list[float]
    launches: list[str]
    remark: str = ""

    def __str__(self) -> str:
        (a, b), (m, n) = self.us, self.launches
        times = f"ours {a:.1f} us in {m} launches, composed {b:.1f} us in {n}; composed / ours {b / a:.2f}"
        return f"{self.name_of_steps}: {times}{self.remark}"

    @property
    def name_of_steps(self) -> str:
        return " + ".join(self.steps)

    @property
    def cell(self) -> str:
        a, b = self.us
        return f"{a:.1f} / {b:.1f}, {b / a:.2f}{self.remark}"


def timed(shape: Shape, given: Inputs, v: Verdict) -> Iterator[Row]:
    """All steps that both sides have, all but the first, and each by itself."""
    steps = v.steps(shape)
    groups = list(dict.fromkeys((steps, steps[1:], *((step,) for step in steps))))
    counts = {group: _sets(shape, given, group) for group in groups if group}
    inputs = [given, *(given.copy() for _ in range(max(counts.values(), default=1) - 1))]
    sets = [(sides(shape, each), v.before.copy()) for each in inputs]
    for group, count in counts.items():
        calls = [[jointly(pair[i], group, before) for pair, before in sets[:count]] for i in (0, 1)]
        for each in (*calls[0], *calls[1]):
            each()  # what is made once is made now
        runs, remarks = zip(*(_captured(c) for c in calls), strict=True)
        us = timing.interleaved(list(runs))
        yield Row(shape.name, group, us, [_launches(c[0]) for c in calls], "".join(remarks))


def _sets(shape: Shape, given: Inputs, steps: tuple[str, ...]) -> int:
    """How many inputs these steps need to find theirs cold, bounded by memory and by the length of a graph."""
    torch.cuda.empty_cache()
    cache = torch.cuda.get_device_properties(given.q.device).L2_cache_size
    free = torch.cuda.mem_get_info(given.q.device)[0]
    touched = sum(shape.touched(step) for step in steps)
    return int(max(1, min(-(-3 * cache // touched), free // 3 // (2 * given.nbytes), 400)))


def _captured(calls: timing.Calls) -> tuple[timing.Run, str]:
    try:
        return timing.graph(calls), ""
    except Exception as failure:
        torch.cuda.synchronize()
        return timing.plain(calls), f" (no CUDA graph: {run._message(failure)})"


def _launches(call: Callable[[], Any]) -> str:
    try:
        return str(sum(e.count for e in models.launched(call)))
    except RuntimeError:  # without a profiler times are still there
        return "?"


def compare(shape: Shape, title: str) -> tuple[int, list[Row]]:
    """Print the lines of one call; how many steps of ours are wrong, or failed, and the times."""
    log, wrong, rows = models.log, 0, []
    with models.part(f"  {shape.name}") as failed:
        given = made(shape, "cuda")
        v = judged(shape, given)
        log(f"  {title}, {shape.name}: {f'WRONG: {v.wrong}' if v.wrong else 'right'}: {v}")
        for step, why in v.missing.items():
            log(f"    {step} of the composed layer is missing: {why}")
        wrong = len(v.wrong)
        for row in timed(shape, given, v) if not wrong else ():
            log(f"    {row}")
            rows.append(replace(row, name=f"{title}, {row.name}"))
    torch.cuda.empty_cache()
    return wrong + len(failed), rows


def table(rows: list[Row]) -> Table:
    """A line for each call: all steps that both sides have, and some of them by themselves."""
    groups = ("choose + attend", "write", "choose", "attend")
    title = "us, ours / composed, and composed / ours: CUDA graphs, cold inputs, in turns, medians"
    names = ("layer", "steps together", "all", "launches", *groups)
    out = Table(*(Column(n, overflow="fold") for n in names), title=title)
    for name, found in itertools.groupby(rows, lambda row: row.name):
        first, *others = found
        cells = {row.name_of_steps: row.cell for row in (first, *others)}
        launches = " / ".join(first.launches)
        out.add_row(name, first.name_of_steps, first.cell, launches, *(cells.get(group, "") for group in groups))
    return out


def kernels(shapes: list[Shape], arch: str) -> list[Any]:
    """What our side will ask to be compiled, found on tensors without data."""
    with FakeTensorMode(allow_non_fake_inputs=True), asked_by(arch) as asked:
        for shape in shapes:
            ours = Ours(shape, made(shape, "cpu"))
            q = ours.write()
            ours.attend(q, ours.choose() if shape.chooses else None)
    return list(asked.kernels)
