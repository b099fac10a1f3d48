"""The FP4 ops against the modules of transformers that hold the same mathematics in full precision.

The modules get weights that FP4 can hold, so that quantisation changes nothing and only arithmetic is compared: to
1e-10 in float64, and in float32 to at most four times the error that the module itself makes against float64.
"""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

A = torch.ops.attnkit
E, N, M, K, TOKENS = 5, 64, 96, 2, 17


def _representable(rows, columns, count, format, gen, layout="linear"):
    """(count, rows, columns) codes, scales, and the numbers they stand for, which float32 holds exactly."""
    w = torch.randn(count, rows, columns, generator=gen) * 1.5 * columns**-0.5
    quantize = A.nvfp4_quantize if format == "nvfp4" else A.mxfp4_quantize
    dequantize = A.nvfp4_dequantize if format == "nvfp4" else A.mxfp4_dequantize
    codes, scale = quantize(w)
    values = dequantize(codes, scale)
    if layout == "128x4":
        scale = torch.stack([quantize(e, scale_layout=layout)[1] for e in w])
    return codes, scale, values


def _deepseek():
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts as Experts

    config = transformers.DeepseekV4Config(
        hidden_size=N, moe_intermediate_size=M, n_routed_experts=E, num_experts_per_tok=K, swiglu_limit=0.7
    )
    return Experts, config, dict(limit=0.7)


def _gptoss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

    config = transformers.GptOssConfig(
        hidden_size=N, intermediate_size=M, num_local_experts=E, num_experts_per_tok=K, swiglu_limit=0.9
    )
    return Experts, config, dict(limit=0.9, alpha=1.702, swiglu="gptoss", interleaved=True)


def _qwen():
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts as Experts

    config = transformers.Qwen3_5MoeTextConfig(
        hidden_size=N, moe_intermediate_size=M, num_experts=E, num_experts_per_tok=K
    )
    return Experts, config, {}


def _agree(ours, theirs, want):
    """float32: ours and theirs against the module in float64."""
    scale = torch.finfo(torch.float32).eps * want.abs().max()  # a module that is exact by luck sets no standard
    assert (ours.double() - want).abs().max() <= 4 * ((theirs.double() - want).abs().max() + scale)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", [_deepseek, _gptoss, _qwen])
def test_experts(family, format, layout):
    gen = torch.Generator().manual_seed(1)
    cls, config, kwargs = family()
    config._experts_implementation = "eager"
    module = cls(config).eval().requires_grad_(False)
    w13, s13, n13 = _representable(2 * M, N, E, format, gen, layout)
    w2, s2, n2 = _representable(N, M, E, format, gen, layout)
    transposed = cls.__name__ == "GptOssExperts"
    assert (module.gate_up_proj.shape == (E, N, 2 * M)) == transposed
    module.gate_up_proj.copy_(n13.transpose(1, 2) if transposed else n13)
    module.down_proj.copy_(n2.transpose(1, 2) if transposed else n2)
    bias = {}
    if transposed:
        module.gate_up_proj_bias.copy_(torch.randn(E, 2 * M, generator=gen))
        module.down_proj_bias.copy_(torch.randn(E, N, generator=gen))
        bias = dict(bias13=module.gate_up_proj_bias.clone(), bias2=module.down_proj_bias.clone())
    x, weights = torch.randn(TOKENS, N, generator=gen), torch.rand(TOKENS, K, generator=gen)
    indices = torch.rand(TOKENS, E, generator=gen).argsort(-1)[:, :K]

    def ours(dtype):
        typed = {n: b.to(dtype) for n, b in bias.items()}
        return A.fp4_moe(
            x.to(dtype), weights, indices, w13, s13, w2, s2, **typed, format=format, scale_layout=layout, **kwargs
        )

    theirs = module(x, indices, weights)
    want = module.double()(x.double(), indices, weights.double())
    assert (ours(torch.float64) - want).abs().max() <= 1e-10 * want.abs().max()
    _agree(ours(torch.float32), theirs, want)


def test_an_expert_of_another_rank_is_minus_one():
    """DeepSeek-V4's module skips the index num_experts (an expert of another rank); the op's word for it is -1."""
    gen = torch.Generator().manual_seed(2)
    cls, config, kwargs = _deepseek()
    config._experts_implementation = "eager"
    module = cls(config).eval().requires_grad_(False).double()
    w13, s13, n13 = _representable(2 * M, N, E, "nvfp4", gen)
    w2, s2, n2 = _representable(N, M, E, "nvfp4", gen)
    module.gate_up_proj.copy_(n13)
    module.down_proj.copy_(n2)
    x, weights = torch.randn(6, N, generator=gen).double(), torch.rand(6, K, generator=gen)
    indices = torch.tensor([[0, E], [E, E], [3, 1], [E, 4], [2, 0], [1, E]])
    want = module(x, indices, weights.double())
    got = A.fp4_moe(x, weights, indices.masked_fill(indices == E, -1), w13, s13, w2, s2, **kwargs)
    assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    assert not bool(got[1].any()) and not bool(want[1].any())


@pytest.mark.parametrize("format", ["none", "nvfp4", "mxfp4"])
def test_grouped_output_projection(format):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    gen = torch.Generator().manual_seed(3)
    groups, k, rank = 3, 128, 10
    module = DeepseekV4GroupedLinear(k, groups * rank, groups).eval().requires_grad_(False)
    if format == "none":
        o, w = torch.randn(TOKENS, groups, k, generator=gen), torch.randn(groups, rank, k, generator=gen)
        scales = ()
    else:
        oc, so, o = _representable(groups, k, TOKENS, format, gen)
        wc, sw, w = _representable(rank, k, groups, format, gen)
        scales = (so, sw)
    module.weight.copy_(w.reshape(groups * rank, k))
    theirs = module(o)
    want = module.double()(o.double())
    first = (oc, wc) if scales else (o, w)
    _agree(A.grouped_output_projection(*first, *scales, format=format), theirs, want)
    if format == "none":
        exact = A.grouped_output_projection(o.double(), w.double())
    else:
        exact = A.grouped_output_projection(*first, *scales, format=format, dtype=torch.float64)
    assert (exact - want).abs().max() <= 1e-10 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_inverse_rope_fp4(format, dtype):
    """Code for code: DeepSeek-V4 turns the attention output back with cos and -sin, in float32, then rounds."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    gen = torch.Generator().manual_seed(4)
    o = torch.randn(TOKENS, 4, 512, generator=gen).to(dtype)
    angle = torch.arange(TOKENS)[:, None] * 10000.0 ** (-torch.arange(32) / 32)  # (Tq, R2)
    cos, sin = angle.cos(), angle.sin()
    rotated = apply_rotary_pos_emb(o.transpose(0, 1)[None], cos[None], -sin[None])[0].transpose(0, 1)
    quantize = A.nvfp4_quantize if format == "nvfp4" else A.mxfp4_quantize
    want = quantize(rotated.contiguous())
    got = A.inverse_rope_fp4(o, cos, sin, format=format)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not torch.equal(got[0], quantize(o)[0]), "the rotation does something"
