"""What the kernel for blocks of queries over pages of E4M3 is compiled for."""

from dataclasses import dataclass

from . import multi_codes_types


@dataclass(frozen=True)
class Config(multi_codes_types.Config):
    """What is fixed at compile time; the properties are what ``page_loads.Boxes`` asks for."""

    page: int = 8  # keys
    box: int = 8  # keys that TMA loads at once

    @property
    def boxes(self) -> int:
        """Of a block of keys, for each of its runs of columns."""
        return self.tile_n // self.box

    @property
    def box_columns(self) -> int:
        """Of K's boxes: what a row of the swizzled layout has, in bytes."""
        return next(columns for columns in (128, 64, 32) if self.dim % columns == 0)
