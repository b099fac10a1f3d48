"""flash-linear-attention's fused gated RMS norm, and its gated delta rule: a recurrent step and chunks (Triton)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def adapt(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    if op == "gated_rmsnorm":
        return _norm(args, kwargs)
    if op == "gated_delta_rule":
        return _rule(args, kwargs)
    return _step(args, kwargs) if op == "gated_delta_step" else None


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
