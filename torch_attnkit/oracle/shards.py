"""How calls of ops that are alike are shared among processes, as entries for the ``shards`` field of their tables."""

from __future__ import annotations

from dataclasses import replace

from torch_attnkit.core.op import Call, Shards


def linear(c: Call) -> bool:
    """Whether the scales stand beside their rows; tiles of the 128x4 layout hold several rows and blocks."""
    return bool(c.arg.scale_layout == "linear")


def with_linear_scales(ways: tuple[Shards, ...]) -> tuple[Shards, ...]:
    def narrowed(shards: Shards) -> Shards:
        return replace(shards, when=lambda c: shards.when(c) and linear(c))

    return tuple(map(narrowed, ways))


def _every_key(c: Call) -> bool:
    """Whether all queries see the same keys, wherever among the queries they stand."""
    return not c.arg.causal and c.arg.window < 0


# Query heads go with their KV head; the one KV head of all is everywhere.
HEADS = (Shards("Hq Hkv"), Shards("Hq", when=lambda c: c.dim["Hkv"] == 1))
ATTENTION = (Shards("B"), *HEADS)
QUERIES = (Shards("T", when=_every_key),)
# Tokens that name their request, or all of one request, may be anywhere; others go with their request.
_TOKENS = Shards("Tq", when=lambda c: c.arg.request_ids is not None or c.dim["R"] == 1)
SPARSE = (_TOKENS, Shards("Tq R", when=lambda c: c.arg.request_ids is None), Shards("Hq"))
INDEXER = (
    _TOKENS,
    Shards("Tq Rk", when=lambda c: c.arg.request_ids is None and c.arg.block_table is None),
    Shards("Tq R", when=lambda c: c.arg.request_ids is None and c.arg.block_table is not None),
)
# Rows of block-scaled numbers, or whole blocks of every row.
BLOCKS = (Shards("...", when=linear), Shards("K", when=linear))
ROUTES = (Shards("R"),)
