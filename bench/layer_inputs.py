"""What the attention of one DeepSeek-V4 layer is given: the sizes of a call, and random tensors of these sizes.

Only what the steps of ``bench.layer_steps`` read is made. Projections and the compressor, which come before, are not:
q and keys are what projections and the norm of keys leave, entries of the cache are all complete. Numbers of the
indexer are small integers, whose scores are exact in float32 in whatever order a kernel adds them up, so that what it
chooses can be compared exactly, but for ties. A decode step has rows of FP8, as caches are served; a prefill has rows
of bfloat16, which is what FlashMLA's prefill kernel reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from torch_attnkit.formats import kv_cache

PAGE = 64  # rows of a page, of every cache
KINDS = {
    "window": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """``tokens`` new ones of each of ``batch`` sequences, behind ``context`` tokens each."""

    kind: str
    batch: int
    tokens: int
    context: int
    heads: int = 64
    dim: int = 512
    rope: int = 64
    window: int = 128
    rate: int = 0  # tokens of an entry; 0: there are none
    topk: int = 512
    index_heads: int = 64
    index_dim: int = 128

    def __post_init__(self) -> None:
        if self.tokens > 1 and self.batch > 1:
            raise ValueError(f"a prefill is of one sequence here, not of {self.batch}")
        if self.decode and (self.entries % PAGE or (self.chooses and self.entries < self.topk)):
            raise ValueError(
                f"{self.entries} entries behind {self.context} tokens; accepted: whole pages of {PAGE}, and as many as"
                " are chosen"
            )

    @property
    def name(self) -> str:
        what = f"decode, batch {self.batch}" if self.decode else f"prefill, {self.tokens} tokens"
        return what + (f", behind {self.context}" if self.context else "")

    @property
    def decode(self) -> bool:
        return self.tokens == 1

    @property
    def format(self) -> str:
        return "fp8" if self.decode else "none"

    @property
    def queries(self) -> int:
        return self.batch * self.tokens

    @property
    def chooses(self) -> bool:
        return self.kind == "csa"

    @property
    def entries(self) -> int:
        """Of a sequence. A decode step completes none."""
        return (self.context + (0 if self.decode else self.tokens)) // self.rate if self.rate else 0

    @property
    def before(self) -> int:
        """Rows of a sequence's window in front of the new ones; of a decode step an odd number."""
        if self.decode:
            return -(-self.window // PAGE) * PAGE + PAGE - 2
        return min(self.context, self.window - 1)

    @property
    def keys(self) -> int:
        """Rows that a sequence's window has room for: whole pages."""
        return -(-(self.before + self.tokens) // PAGE) * PAGE

    @property
    def row(self) -> int:
        """Elements of a row: bytes, or numbers."""
        return kv_cache.row_bytes(self.format, self.dim, self.rope)

    def touched(self, step: str) -> int:
        """Bytes that a step reads and writes, each once."""
        T, q = self.queries, self.queries * self.heads * self.dim * 4  # q, and what becomes of it, in 16 bits
        if step == "choose":
            scores = 0 if self.decode else T * self.entries * 4
            return self.batch * self.entries * (self.index_dim + 4) + T * self.index_heads * self.index_dim + scores
        if step == "write":
            return q + T * self.dim * 4
        keys = self.window + (min(self.topk, self.entries) if self.chooses else self.entries)
        return q + self.row * (T * keys if self.decode else self.keys + self.entries)


@dataclass(frozen=True)
class Inputs:
    """T tokens, R sequences of S window keys and C entries, rows of Rb elements."""

    q: torch.Tensor  # (T, H, D), neither normed nor rotated
    kv: torch.Tensor  # (T, D), not rotated
    position: torch.Tensor  # (T,)
    angles: torch.Tensor  # (positions, 2 * pairs) in float32, cosines before sines
    slot: torch.Tensor  # (T,): the row of all windows where a token's key belongs
    near: torch.Tensor  # (R, S, Rb)
    end: torch.Tensor  # (T,)
    far: torch.Tensor | None  # (R, C, Rb)
    visible: torch.Tensor | None  # (T,): entries that a token may see
    sink: torch.Tensor  # (H,)
    index_q: torch.Tensor | None  # (T, Hi, Di) of E4M3
    index_k: torch.Tensor | None  # (R, C, Di) of E4M3
    index_scale: torch.Tensor | None  # (R, C, 1)
    weights: torch.Tensor | None  # (T, Hi)

    def copy(self) -> Inputs:
        """The same numbers elsewhere; the angles, which all layers share, stay where they are."""
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        made = {n: t if t is None or n == "angles" else t.clone() for n, t in tensors.items()}
        return Inputs(**made)

    @property
    def nbytes(self) -> int:
        """Of a copy."""
        tensors = (getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "angles")
        return sum(t.nbytes for t in tensors if t is not None)

    def request(self, shape: Shape) -> torch.Tensor:
        """The sequence of each token (T,)."""
        return torch.arange(shape.queries, device=self.q.device) // shape.tokens


def shape_of(settings: Any, kind: str, batch: int, tokens: int, context: int) -> Shape:
    """Of a layer of this kind in a model of these settings, a ``DeepseekV4Config``."""
    c = settings
    return Shape(
        kind, batch, tokens, context, heads=c.num_attention_heads, dim=c.head_dim,
        rope=int(c.head_dim * c.partial_rotary_factor), window=c.sliding_window,
        rate=c.compress_rates.get(KINDS[kind], 0), topk=c.index_topk, index_heads=c.index_n_heads,
        index_dim=c.index_head_dim,
    )  # fmt: skip


def made(shape: Shape, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    s, T, bf16 = shape, shape.queries, torch.bfloat16
    with torch.device(device):
        within = torch.arange(T) % s.tokens  # (T,): a token's number in its sequence
        angle = torch.rand(s.context + s.tokens, s.rope // 2) * 6.2832
        common = dict(
            q=torch.randn(T, s.heads, s.dim, dtype=bf16),
            kv=torch.randn(T, s.dim, dtype=bf16),
            position=within + s.context,
            angles=torch.cat((angle.cos(), angle.sin()), 1),
            slot=torch.arange(T) // s.tokens * s.keys + s.before + within,
            near=_rows(s, s.keys),
            end=(within + s.before + 1).int(),
            sink=torch.randn(s.heads) + 5,  # a share of the denominator that is seen
        )
        far = _rows(s, s.entries) if s.rate else None
        visible = ((within + s.context + 1) // s.rate).clamp(max=s.entries).int() if s.rate else None
        index = _indexer(s) if s.chooses else dict.fromkeys(("index_q", "index_k", "index_scale", "weights"))
    return Inputs(far=far, visible=visible, **common, **index)


def _rows(s: Shape, count: int) -> torch.Tensor:
    """Random rows (R, count, Rb) as caches hold them, made sequence by sequence: numbers take more than bytes."""
    rows = torch.empty(s.batch, count, s.row, dtype=torch.uint8 if s.format == "fp8" else torch.bfloat16)
    for held in rows:
        held.copy_(kv_cache.encode_rows(torch.randn(count, s.dim, dtype=torch.bfloat16), s.format, s.rope))
    return rows


def _indexer(s: Shape) -> dict[str, Any]:
    """Integers from -2 to 2 with scales of 1 and 2, and integers from -60 to 60 as weights: sums below 2^24."""
    keys = torch.empty(s.batch, s.entries, s.index_dim, dtype=torch.float8_e4m3fn)
    for held in keys:
        held.copy_(torch.randint(-2, 3, held.shape, dtype=torch.float32))
    return dict(
        index_q=torch.randint(-2, 3, (s.queries, s.index_heads, s.index_dim), dtype=torch.float32).to(keys.dtype),
        index_k=keys,
        index_scale=torch.randint(1, 3, (s.batch, s.entries, 1), dtype=torch.float32),
        weights=torch.randint(-60, 61, (s.queries, s.index_heads), dtype=torch.float32),
    )
