"""Attention with gradients: flash_attention's kernels forward, those of flash-attn-4 backward.

The op itself has no backward. What flash-attn-4 needs for one is out and the natural-log LSE, which are what the op
returns. Its backward is an interface that it calls private: it has been run with flash-attn-4 4.0.0b36, on an H200
and, for Hopper and Blackwell, in the PTX simulator. ``pip install flash-attn-4`` once it is needed.
Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2; FlashAttention-4.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_attnkit.core import UnsupportedError

HEAD_DIMS = (64, 128)  # that the backward was run with
_DEVICES = ("cuda",)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int = -1,
    deterministic: bool = False,
) -> torch.Tensor:
    """``torch.ops.attnkit.flash_attention(q, k, v, ...)[0]``, through which gradients of q, k and v flow.

    q (B, T, Hq, D), k and v (B, S, Hkv, D) in bfloat16 or float16, on a Hopper or Blackwell GPU; D 64 or 128.
    ``scale``, ``causal`` and ``window`` are the op's. ``deterministic``: the backward adds up dq in one order, which
    costs time. Without an input that requires a gradient it is the op. Returns out (B, T, Hq, D). There is no second
    derivative.

    Raises:
        UnsupportedError: a gradient is asked for, and flash-attn-4 is not installed, or the device, the dtype, D, a
            window of 0, or more queries than keys with causality or a window, is not what the backward was run with.
        ValueError, TypeError: what the op raises.
    """
    options = dict(scale=scale, causal=causal, window=window)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))):
        out: torch.Tensor = torch.ops.attnkit.flash_attention(q, k, v, **options)[0]
        return out
    _check(q, k, v, causal, window)
    found: torch.Tensor = _Attention.apply(q, k, v, options, deterministic)
    return found


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() == 4 and (
            tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.shape[3] not in HEAD_DIMS
        ):
            raise UnsupportedError(
                f"flash_attention with gradients: {name} is {tensor.dtype} with D={tensor.shape[-1]}, accepted:"
                f" bfloat16 or float16 with D in {HEAD_DIMS}"
            )
    if q.device.type not in _DEVICES:
        raise UnsupportedError(
            f"flash_attention with gradients: q is on {q.device}, accepted: a Hopper or Blackwell GPU; elsewhere use"
            " torch.nn.functional.scaled_dot_product_attention"
        )
    if window == 0 or ((causal or window > 0) and q.shape[1] > k.shape[1]):
        raise UnsupportedError(
            f"flash_attention with gradients: window is {window}, with {q.shape[1]} queries and {k.shape[1]} keys;"
            " accepted: calls in which every query sees a key"
        )
    _backward()


def _backward() -> Any:
    """flash-attn-4's function for gradients."""
    try:
        from flash_attn.cute.interface import _flash_attn_bwd
    except ImportError as error:
        raise UnsupportedError(
            f"flash_attention with gradients: flash-attn-4 cannot be imported ({error}), accepted: pip install"
            " flash-attn-4; without gradients call under torch.no_grad()"
        ) from None
    return _flash_attn_bwd


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], deterministic: bool
    ) -> torch.Tensor:
        out, lse, _ = torch.ops.attnkit.flash_attention(q, k, v, **options)  # (B, T, Hq, D), (B, T, Hq)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.deterministic = options, deterministic
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        causal, window = ctx.options["causal"], ctx.options["window"]
        # A window counts the query itself; flash-attn-4 counts the keys on either side of it.
        left = None if window < 0 else window - 1
        right = None if window < 0 else 0 if causal else window - 1
        found = _backward()(
            *(t.contiguous() for t in (q, k, v)), out, grad.contiguous(), lse.transpose(1, 2).contiguous(),
            softmax_scale=ctx.options["scale"], causal=causal and window < 0, window_size_left=left,
            window_size_right=right, deterministic=ctx.deterministic,
        )  # fmt: skip
        wanted = ctx.needs_input_grad[:3]
        return (*(g if needed else None for g, needed in zip(found, wanted, strict=True)), None, None)
