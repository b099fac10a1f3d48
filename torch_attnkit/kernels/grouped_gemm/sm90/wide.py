"""Wide work tiles of the few-token kernels on Hopper: for experts with more tokens than most. Imports no cutlass.

A plan knows means, so its work tiles have room for what most experts have; one of 128 tokens would be 16 of them, each
of which decodes its weights. An expert with more has wide work tiles, whose stages hold half of K, so that the same
memory has room for eight times the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from .config import _SHARED, CONSUMERS, MOST_COLUMNS, Config

_COLUMNS = (64, 32)  # most tokens of a wide work tile
_GROUPS = (2, 4, 8)  # of 8 tokens, that one may be multiplied as
_ALIGNMENT = 1024  # of a stage, whose codes TMA swizzles


@dataclass(frozen=True)
class WideConfig(Config):
    """The same product for wide work tiles. Their stages are of one box."""

    @property
    def boxes(self) -> int:
        return 1

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(w for w in _GROUPS if 8 * w <= self.columns)


def widened(config: Config, columns: int) -> WideConfig:
    """What has the same rows and so many tokens."""
    same = {field.name: getattr(config, field.name) for field in fields(Config)}
    made = WideConfig(**same | dict(columns=columns))
    if config.scale_vector > 0:
        made = replace(made, scale_vector=math.gcd(config.scale_vector, made.scales))
    return made


def stage_bytes(*configs: Config) -> int:
    """Of a stage that has room for what work tiles of either kind need."""
    most = max(c.factor_bytes + c.weight_bytes + c.token_bytes for c in configs)
    return -(-most // _ALIGNMENT) * _ALIGNMENT


def wide_columns(config: Config) -> int:
    """Most tokens of a wide work tile, if there is room for any without a stage less; otherwise 0."""
    if config.row_warps != CONSUMERS:
        return 0
    for columns in _COLUMNS:
        wide = widened(config, columns)
        beside = max(config.result_bytes, wide.result_bytes) + config.line_bytes
        fits = config.stages * stage_bytes(config, wide) + beside <= _SHARED
        at_once = config.activations == "none" or columns <= MOST_COLUMNS  # features that are rounded
        if fits and at_once and columns > config.columns:
            return columns
    return 0
