"""flash-linear-attention (Triton): its fused gated RMS norm, gated delta rule, KDA step and short convolution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    by_op = {
        "gated_rmsnorm": _norm, "gated_delta_rule": _rule, "gated_delta_step": _step, "kimi_delta_step": _kimi_step,
        "causal_conv1d": _convolution,
    }  # fmt: skip
    return by_op[op](args, kwargs) if op in by_op else None


def _norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd

    y, z = (a.reshape(-1, a.shape[-1]) for a in args[:2])
    forward = functools.partial(
        layer_norm_gated_fwd,
        y,
        z,
        args[2],
        None,
        activation="swish",
        eps=kwargs["eps"],
        out_dtype=z.dtype,
        is_rms_norm=True,
    )
    return lambda: forward()[0].view(args[1].shape)


def _step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """One token a sequence: fla has no slots, and returns the state. Its states are gathered once."""
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd

    q, k, v, a, b, A_log, dt_bias, state, index, accepted = args
    if q.shape[1] > 1 or accepted is not None or not kwargs["qk_l2norm"] or kwargs["beta_scale"] != 1:
        return None
    if bool((index < 0).any()):
        return None
    step = functools.partial(
        fused_recurrent_gated_delta_rule_fwd,
        *(t.contiguous() for t in (q, k, v)),
        g=a.contiguous(),
        beta=b.contiguous(),
        scale=q.shape[-1] ** -0.5,
        initial_state=state[index[:, 0].long()],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )
    return lambda: step()[0]


def _kimi_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """States in place, in the slots of the pool; fla takes a slot of no state for a real one."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    q, k, v, a, b, A_log, dt_bias, state, index, accepted = args
    if bool((index < 0).any()):
        return None
    step = functools.partial(
        fused_recurrent_kda_fwd,
        *(t.contiguous() for t in (q, k, v, a, b)),
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=state,
        scale=kwargs.get("scale"),
        state_v_first=True,
        ssm_state_indices=index,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=kwargs["qk_l2norm"],
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=kwargs.get("lower_bound"),
        out=torch.empty_like(v, memory_format=torch.contiguous_format),
    )
    return lambda: step()[0]


def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """One token a sequence, or sequences of one length as a batch; states are gathered once, and hold W tokens."""
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd, causal_conv1d_update

    x, weight, state, offsets, index, bias, past = args
    lengths = set(offsets.diff().tolist())
    if len(lengths) != 1 or offsets[-1] != len(x) or state.shape[2] != weight.shape[1] or bool((index < 0).any()):
        return None
    activation = None if kwargs["activation"] == "none" else kwargs["activation"]
    first = state[index.long()].clone()
    if past is not None:
        first[past == 0] = 0.0
    if lengths == {1}:
        return lambda: causal_conv1d_update(x, first, None, weight, bias, activation)[0]
    batch = x.unflatten(0, (len(index), -1))
    run = functools.partial(causal_conv1d_fwd, batch, weight, bias, None, first, True, activation)
    return lambda: run()[0].flatten(0, 1)


def _rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Sequences of one length, which fla takes as a batch; its states are gathered once."""
    from fla.modules.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    q, k, v, g, beta, state, offsets, index, past = args
    lengths = set(offsets.diff().tolist())
    if len(lengths) != 1 or offsets[-1] != len(q) or not kwargs["qk_l2norm"] or bool((index < 0).any()):
        return None
    q, k, v, g, beta = (t.unflatten(0, (len(index), -1)).contiguous() for t in (q, k, v, g, beta))
    first = state[index.long()].clone()
    if past is not None:
        first[past == 0] = 0.0

    def run() -> Any:
        normed = [l2norm_fwd(t)[0] for t in (q, k)]
        return chunk_gated_delta_rule_fwd(
            *normed, v, g, beta, scale=q.shape[-1] ** -0.5, initial_state=first, output_final_state=True,
            state_v_first=True,
        )  # fmt: skip

    return lambda: run()[1].flatten(0, 1)
