"""Nothing is known to keep Apple's compiler from the Metal sources of DeepSeek-V4's attention, in any variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_attnkit.mps import library
from torch_attnkit.sim import metal
from torch_attnkit.sim.metal.lint import lint

pytestmark = [pytest.mark.simulator, pytest.mark.proof]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPARSE = dict(
    TYPE=BF16, DIM=512, HEADS=32, SLICE=128, KEYS=16, WIDTH=4, LISTED=1, NEAR_PAGED=1, FAR_PAGED=1,
    FORMAT=0, ROPE=0, DIVIDED=0,
)  # fmt: skip
CODES = SPARSE | dict(BLOCK=16, PAIRS=32, ANGLE_TYPE=F32, SWIZZLED=0, WORDS=1)
SCORES = dict(FORMAT=0, TYPE=BF16, W_TYPE=F32, DIM=128, BLOCKS=2, SIMDS=8, WIDTH=4, PAGED=1, NAMED=1, Q_SCALED=0)
TOPK = dict(TYPE=BF16, SIMDS=4, KEPT=4, LISTED=0, RAGGED=1)
PRODUCT = dict(
    FORMAT=0, TYPE=BF16, OUT_TYPE=F16, ROWS=2, COLUMNS=4, SIMDS=4, WIDTH=4, SWIZZLED=0, X_DIVIDED=0, W_DIVIDED=0
)
SOURCES: list[tuple[str, dict[str, Any]]] = [
    ("sparse_fmha_with_swa", SPARSE),
    ("sparse_fmha_with_swa", SPARSE | dict(HEADS=64, SLICE=256)),
    ("sparse_fmha_with_swa", SPARSE | dict(TYPE=F32, KEYS=8, WIDTH=1, LISTED=0, NEAR_PAGED=0)),
    ("sparse_fmha_with_swa", SPARSE | dict(FORMAT=1, ROPE=64)),
    ("sparse_fmha_with_swa", SPARSE | dict(FORMAT=2, ROPE=64, WIDTH=1, DIVIDED=1)),
    ("sparse_fmha_with_swa", SPARSE | dict(FORMAT=3, ROPE=0, TYPE=F16)),
    ("sparse_fmha_inverse_rope_fp4", CODES),
    ("sparse_fmha_inverse_rope_fp4", CODES | dict(HEADS=64, SLICE=256, BLOCK=32, ANGLE_TYPE=BF16, SWIZZLED=1)),
    ("sparse_fmha_inverse_rope_fp4", CODES | dict(TYPE=F32, KEYS=8, WIDTH=1, PAIRS=0, SWIZZLED=1)),
    ("sparse_fmha_inverse_rope_fp4", CODES | dict(FORMAT=2, ROPE=64, DIVIDED=1, TYPE=F16, ANGLE_TYPE=F16, PAIRS=256)),
    ("indexer_scores", SCORES),
    ("indexer_scores", SCORES | dict(FORMAT=1, TYPE=F16, W_TYPE=BF16, Q_SCALED=1, NAMED=0)),
    ("indexer_scores", SCORES | dict(FORMAT=2, WIDTH=1, PAGED=0)),
    ("indexer_topk", TOPK),
    ("indexer_topk", TOPK | dict(TYPE=F32, KEPT=0, LISTED=1, RAGGED=0)),
    ("indexer_topk", TOPK | dict(TYPE=F16)),
    ("indexer_select", TOPK | dict(TYPE=F32, CHOOSES=1)),
    ("indexer_select", SCORES | dict(CHOOSES=0)),
    ("grouped_output_projection", PRODUCT),
    ("grouped_output_projection", PRODUCT | dict(WIDTH=1)),
    ("grouped_output_projection", PRODUCT | dict(FORMAT=1, TYPE=F16, SWIZZLED=1, X_DIVIDED=1, W_DIVIDED=1)),
    ("grouped_output_projection", PRODUCT | dict(FORMAT=2, WIDTH=1)),
]


@pytest.mark.parametrize("i", range(len(SOURCES)))
def test_nothing_is_known_to_keep_apples_compiler_from_the_sources(i: int):
    """For macOS 14 (Metal 3.1) and later, and in threadgroup memory that every GPU has."""
    text = library.source(*SOURCES[i])
    assert [str(f) for f in lint(text)] == []
    compiled = metal.compile_shader(text)
    for kernel in dir(compiled):
        assert getattr(compiled, kernel).static_thread_group_memory_length <= 32768
