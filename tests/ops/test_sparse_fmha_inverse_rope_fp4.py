"""sparse_fmha_inverse_rope_fp4: attention, then inverse_rope_fp4; what it refuses; which codes count as right."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.formats import e2m1
from torch_attnkit.oracle import fp4_results

A = torch.ops.attnkit
NAME = "sparse_fmha_inverse_rope_fp4"
op = getattr(A, NAME)
OP = OPS[NAME]
CALLS = [(shape, features) for shape in parity.shapes(OP) for features in parity.all_features(OP, tuple(OP.features))]
CALLS += [(shape, ()) for shape in parity.shapes(OP)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "features"), CALLS)
def test_equals_the_two_ops_in_sequence(shape, features, dtype):
    args, kwargs = parity.inputs(OP, shape, dtype, features)
    of_codes = {"groups": "groups", "o_format": "format", "scale_layout": "scale_layout"}
    out, *_ = A.sparse_fmha_with_swa(
        *args[:3], *args[5:-1], **{name: value for name, value in kwargs.items() if name not in of_codes}
    )
    want = A.inverse_rope_fp4(out, args[3], args[4], args[-1], **{of_codes[n]: kwargs[n] for n in of_codes})
    got = op(*args, **kwargs)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert shape in parity.shapes(OP).keys() - OP.module("cases").PARITY or (got[0] & 0x77).any()


def test_goes_on_into_the_output_projection():
    gen = torch.Generator().manual_seed(0)
    q, kv = torch.randn(5, 4, 64, generator=gen), torch.randn(1, 9, 64, generator=gen)
    end, angle = torch.arange(5, 10, dtype=torch.int32), torch.rand(5, 16, generator=gen)
    codes, scale = op(q, kv, end, angle.cos(), angle.sin(), o_global=torch.tensor(500.0), groups=2)
    wo_a = torch.randn(2, 8, 128, generator=gen)
    weight, weight_scale = A.nvfp4_quantize(wo_a)
    got = A.grouped_output_projection(
        codes.view(5, 2, 64), weight, scale.view(5, 2, 8), weight_scale, torch.tensor(500.0), format="nvfp4",
        dtype=torch.float32,
    )  # fmt: skip
    out, *_ = A.sparse_fmha_with_swa(q, kv, end)
    pair = torch.view_as_complex(out[..., 32:].unflatten(-1, (16, 2)).contiguous())
    rotated = torch.view_as_real(pair * torch.polar(torch.ones_like(angle), -angle)[:, None]).flatten(-2)
    want = torch.einsum("tgk,grk->tgr", torch.cat((out[..., :32], rotated), -1).view(5, 2, 128), wo_a)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.98


def test_refusals_name_op_argument_found_and_accepted():
    def refused(kind, message, *args, **kwargs):
        with pytest.raises(kind, match=f"^{NAME}: {message}"):
            op(*args, **kwargs)

    q, kv, c = torch.randn(3, 4, 32), torch.randn(1, 9, 32), torch.rand(3, 8)
    end = torch.full((3,), 9, dtype=torch.int32)
    refused(ValueError, r"sin must be \(Tq, R2\), got shape \(3, 7\): R2=7, but cos has R2=8", q, kv, end, c, c[:, :7])
    wide = torch.rand(3, 17)
    refused(ValueError, "cos and sin must have at most D/2 columns.*R2=17", q, kv, end, wide, wide)
    odd = q[..., :24].contiguous(), kv[..., :24].contiguous(), end, c, c
    refused(ValueError, "D must be a multiple of the block of o_format, 16 for nvfp4.*D=24", *odd)
    for groups in (0, -1, 3):
        refused(ValueError, "groups must be at least 1 and divide Hq .*Hq=4", q, kv, end, c, c, groups=groups)
    one = torch.ones(())
    message = "o_global is accepted with o_format 'nvfp4' only"
    refused(ValueError, message, q, kv, end, c, c, o_global=one, o_format="mxfp4")
    refused(ValueError, "o_global is -1, accepted: finite numbers above 0", q, kv, end, c, c, o_global=-one)
    refused(ValueError, "global_scale is accepted with format 'nvfp4' only", q, kv, end, c, c, global_scale=one)
    refused(ValueError, "o_format is 'fp8', accepted: nvfp4, mxfp4", q, kv, end, c, c, o_format="fp8")
    refused(ValueError, r"swa_end\[0\] is 10, accepted: 0 to 9", q, kv, end + 1, c, c)
    refused(ValueError, "topk_indices needs compressed_kv", q, kv, end, c, c, topk_indices=end[:, None])
    refused(TypeError, "cos is f64, accepted: f32", q, kv, end, c.double(), c)


def judged(shape: str, features: tuple[str, ...] = (), dtype: torch.dtype = torch.bfloat16):
    """Results of the reference in ``dtype``, and a function that judges results."""
    args, kwargs = parity.inputs(OP, shape, dtype, features)
    exact, ref = (parity.reference_of(OP, args, kwargs, double=d, function="numbers")[0] for d in (True, False))
    check = lambda codes, scale: OP.module("reference").check("it", [codes, scale], [(exact, ref)], args, kwargs)
    return *op(*args, **kwargs), check


@pytest.mark.parametrize("features", [(), ("compressed", "swizzled", "o_global"), ("sink", "swizzled")])
@pytest.mark.parametrize("shape", ["prefill", "decode", "mxfp4", "nothing"])
def test_codes_and_scales_that_are_off_are_found(shape, features):
    codes, scale, check = judged(shape, features)
    check(codes, scale)
    at = (0,) * codes.dim()
    nibbles = e2m1.unpack(codes)
    large = (nibbles & 7).flatten().argmax()
    for change in (8, 4) if shape != "nothing" else (4,):  # a sign, or half of a code, of a number that is far from 0
        wrong = nibbles.clone()
        wrong.view(-1)[large] ^= change
        with pytest.raises(AssertionError, match="codes"):
            check(e2m1.pack(wrong), scale)
    for change in (16, -16) if shape != "nothing" else (16,):
        wrong = scale.clone()
        wrong[at] = (int(wrong[at]) + change) % 256
        with pytest.raises(AssertionError, match="o_scale"):
            check(codes, wrong)
    if "swizzled" in features:
        wrong = scale.clone()
        wrong.view(-1)[-1] = 1  # row 127 of the last tile: padding
        with pytest.raises(AssertionError, match="padding"):
            check(codes, wrong)


def test_a_code_may_be_its_neighbour_only_at_their_border():
    """Numbers a float32 away from a midpoint of two codes, in float64, and a bound of twice that."""
    step = 2.0**-20
    exact = torch.full((1, 16), 0.5, dtype=torch.float64)
    exact[0, :4] = torch.tensor([6.0, 2.5 + step, 2.5 - step, 2.4])
    size = 2 * step
    scale = torch.tensor([[0x38]], dtype=torch.uint8)  # 1

    def passes(second: int, third: int, fourth: int) -> bool:
        codes = torch.tensor([[7, second, third, fourth] + [1] * 12], dtype=torch.uint8)
        try:
            fp4_results.check("it", e2m1.pack(codes), scale, exact, exact.float(), size, "nvfp4", None)
        except AssertionError:
            return False
        return True

    assert all(passes(a, b, 4) for a in (4, 5) for b in (4, 5))
    assert not any(passes(*wrong) for wrong in ((3, 4, 4), (6, 4, 4), (4, 4, 5), (4, 4, 3), (4, 4, 12)))


def test_a_zero_may_have_either_sign_and_a_number_may_not():
    """Attention's zeros have the signs of sums: where keys are zeros of both signs, or a sink takes all."""
    exact = torch.zeros(1, 16, dtype=torch.float64)
    scale = torch.zeros(1, 1, dtype=torch.uint8)
    for code in (0, 8):
        fp4_results.check(
            "it",
            e2m1.pack(torch.full((1, 16), code, dtype=torch.uint8)),
            scale,
            exact,
            exact.float(),
            0.0,
            "nvfp4",
            None,
        )
    with pytest.raises(AssertionError, match="codes"):
        fp4_results.check(
            "it", e2m1.pack(torch.full((1, 16), 9, dtype=torch.uint8)), scale, exact, exact.float(), 0.0, "nvfp4", None
        )
    exact[0, 0], scale[0, 0] = 6.0, 0x38  # a scale of 1
    exact[0, 1] = 1e-3  # beyond the bound from zero, whose code is that of a positive zero alone
    for code, right in ((0, True), (8, False)):
        codes = e2m1.pack(torch.tensor([[7, code] + [8] * 14], dtype=torch.uint8))
        if right:
            fp4_results.check("it", codes, scale, exact, exact.float(), 1e-4, "nvfp4", None)
        else:
            with pytest.raises(AssertionError, match="codes"):
                fp4_results.check("it", codes, scale, exact, exact.float(), 1e-4, "nvfp4", None)


def test_nan_has_the_code_of_six_and_no_part_in_a_scale():
    exact = torch.linspace(-1, 1, 32, dtype=torch.float64)[None]
    exact[0, 3] = torch.nan
    codes, scale = A.mxfp4_quantize(exact.float())
    fp4_results.check("it", codes, scale, exact, exact.float(), 1e-3, "mxfp4", None)
    wrong = e2m1.unpack(codes)
    assert wrong[0, 3] == 7
    wrong[0, 3] = 6
    with pytest.raises(AssertionError, match="nan"):
        fp4_results.check("it", e2m1.pack(wrong), scale, exact, exact.float(), 1e-3, "mxfp4", None)
