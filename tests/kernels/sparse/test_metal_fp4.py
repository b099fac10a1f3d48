"""Sparse attention on Metal whose results are FP4: the bytes of the two ops in sequence, whole and split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_attnkit
from torch_attnkit.kernels.sparse import metal as sparse
from torch_attnkit.ops.sparse_fmha_inverse_rope_fp4 import cases
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
A = torch.ops.attnkit
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# cores: of one core a token is never split; of 40 keys of three tokens are, and of two only those of the third.
SIZES = dict(Tq=3, R=3, S=300, C=20, K=20, window=280, R2=5, groups=3, Ps=4, rope=64, fmt=0)
CASES = [
    pytest.param(40, dict(Hq=9, D=128, blk=16), BF16, ("swizzled", "o_global", "sink"), id="split"),
    pytest.param(2, dict(Hq=9, D=128, blk=32), F16, ("sink",), id="only the last is split"),
    pytest.param(1, dict(Hq=60, D=512, blk=32), BF16, ("swizzled",), id="wide simdgroups", marks=pytest.mark.proof),
    pytest.param(
        1, dict(Hq=60, D=512, blk=16, fmt=2, gs=1), F16, ("o_global",), id="coded rows", marks=pytest.mark.proof
    ),
    pytest.param(40, dict(Hq=6, D=256, blk=32, R2=128), F32, ("swizzled",), id="all pairs", marks=pytest.mark.proof),
    pytest.param(40, dict(Hq=12, D=512, blk=16, R2=0), BF16, ("sink",), id="no pairs", marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("cores", "sizes", "dtype", "features"), CASES)
def test_codes_and_scales_are_those_of_the_two_ops(
    cores: int, sizes: dict[str, int], dtype: torch.dtype, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sparse, "cores_of", lambda target: cores)
    dims, features = SIZES | sizes, ("compressed", "topk", "compressed_len", *features)
    args, kwargs = cases.make(dims, dtype, features, torch.Generator().manual_seed(0))
    how = {n: kwargs[n] for n in ("scale", "window", "format", "rope_dim") if n in kwargs}
    o_global = args[13] if len(args) > 13 else None
    with torch_attnkit.simulate("metal"), metal.settings(mode="checked", strict=True):
        got = A.sparse_fmha_inverse_rope_fp4(*args, **kwargs)
        dense = A.sparse_fmha_with_swa(*args[:3], *args[5:13], **how)[0]
        form: dict[str, Any] = dict(format=kwargs["o_format"], scale_layout=kwargs["scale_layout"])
        want = A.inverse_rope_fp4(dense, *args[3:5], o_global, groups=kwargs["groups"], **form)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


def test_numbers_do_not_go_through_memory():
    """One launch instead of two, and of its results only codes and scales are stored."""
    dims = SIZES | dict(Hq=8, D=128, blk=32, groups=2, Tq=40, R=40, S=16, window=16)
    args, kwargs = cases.make(dims, BF16, ("compressed",), torch.Generator().manual_seed(0))
    with torch_attnkit.simulate("metal"), metal.counting() as reports:
        codes, scale = A.sparse_fmha_inverse_rope_fp4(*args, **kwargs)
    (report,) = reports
    assert sum(written for _, written in report.buffers.values()) == codes.nbytes + scale.nbytes
