"""How calls of ops that are alike are shared among processes, as entries for the ``shards`` field of their tables."""

from __future__ import annotations

from dataclasses import replace

from torch_attnkit.core.op import Predicate, Shards

# Tiles of the 128x4 layout hold several rows and blocks.
LINEAR: dict[str, Predicate] = {"linear scales": lambda c: c.arg.scale_layout == "linear"}
_NAMED: dict[str, Predicate] = {
    "request_ids, or one request": lambda c: c.arg.request_ids is not None or c.dim["R"] == 1
}
_UNNAMED: dict[str, Predicate] = {"no request_ids": lambda c: c.arg.request_ids is None}

# Query heads go with their KV head; the one KV head of all is everywhere.
HEADS = (Shards("Hq Hkv"), Shards("Hq", needs={"one KV head": lambda c: c.dim["Hkv"] == 1}))
ATTENTION = (Shards("B"), *HEADS)
# Where all queries see the same keys, they may be anywhere.
QUERIES = (Shards("T", needs={"neither causality nor a window": lambda c: not c.arg.causal and c.arg.window < 0}),)
# Tokens that name their request, or all of one request, may be anywhere; others go with their request.
SPARSE = (Shards("Tq", needs=_NAMED), Shards("Tq R", needs=_UNNAMED), Shards("Hq"))
INDEXER = (
    Shards("Tq", needs=_NAMED),
    Shards("Tq Rk", needs=_UNNAMED | {"no pages": lambda c: c.arg.block_table is None}),
    Shards("Tq R", needs=_UNNAMED | {"pages": lambda c: c.arg.block_table is not None}),
)
# Rows of block-scaled numbers, or whole blocks of every row.
BLOCKS = (Shards("...", needs=LINEAR), Shards("K", needs=LINEAR))
ROUTES = (Shards("R"),)


def with_linear_scales(ways: tuple[Shards, ...]) -> tuple[Shards, ...]:
    return tuple(replace(shards, needs=shards.needs | LINEAR) for shards in ways)
