"""Work tiles of queries over keys in pages, for persistent CTAs that draw them (``dynamic.py``)."""

import cutlass.cute as cute
from cutlass import Int32

from torch_attnkit.cuda.ring import Fixed

from . import paged_blocks
from .dynamic import queries_by_head
from .multi_blocks import MaskRules, WorkTile
from .multi_types import Layouts, Outputs
from .page_loads import Loads
from .paged_multi import PagedMulti
from .paged_types import Config, Inputs, Rows


class PagedBatch(Fixed):
    """Packed queries; keys come as boxes, which a table places."""

    def __init__(self, config: Config):
        assert config.box > 0, config
        self.c, self.paged, self.loader_warps = config, PagedMulti(config), config.loader_warps
        self.multi, self.prefetch, self.produce = self.paged.multi, self.paged.keys.prefetch, self.paged.produce

    def loads(self, ins: Inputs, layouts: Layouts) -> Loads:
        return self.paged.keys.loads(ins)

    def queries(self, ins: Inputs) -> cute.Tensor:
        return queries_by_head(ins.q, self.c.group)

    def queries_from(self, q: cute.Tensor, tile: WorkTile) -> cute.Tensor:
        return cute.domain_offset((0, tile.seq.q0 + tile.token, 0), q[None, None, None, tile.kv_head])

    def slots(self, ins: Inputs) -> Int32:
        return paged_blocks.all_slots(self.c, ins, self.c.span)

    def tile(self, ins: Inputs, rules: MaskRules, section: Int32, index: Int32) -> tuple:
        return paged_blocks.tile_of(self.c, ins, rules, index, self.c.span)

    def rows(self, ins: Inputs, outs: Outputs, tile: WorkTile) -> tuple[Rows, Outputs]:
        return self.paged.rows(ins, outs, tile)
