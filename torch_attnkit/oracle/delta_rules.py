"""What the ops of the gated delta rule say alike: meanings, axes and conditions."""

from __future__ import annotations

from torch_attnkit.core.op import Call

from . import meanings

MEANING = dict(
    scale="Factor of q; None is 1 / sqrt(K).",
    qk_l2norm="Whether q and k are divided by sqrt(sum of their squares + eps).",
    eps="Added to the sum of the squares before the root is taken; above 0.",
)
VARIES = {"cpu": "how PyTorch adds up follows from how many sequences there are"}
WHOLE = "slots are shared by all sequences; give each process its own pool, or some heads"


def axes(names: str, **own: str) -> dict[str, str]:
    """Of heads, a state and the pool, beside ``names`` of the common ones and an op's ``own``."""
    return meanings.axes(
        names,
        **own,
        Hk="heads of q and k; Hv / Hk neighbouring value heads share one",
        Hv="value heads, each with a state",
        K="channels of a head of q and k",
        V="channels of a value head",
        Ns="slots of the pool",
    )


def _apart(call: Call) -> bool:
    """Whether no two slots, heads or rows of the pool are one memory."""
    state = call.arg.state
    return all(state.stride(axis) > 0 or state.shape[axis] < 2 for axis in range(3))


WHERE = {
    "Hv must be a multiple of Hk": lambda c: c.dim["Hk"] > 0 and c.dim["Hv"] % c.dim["Hk"] == 0,
    "K must be at least 1": lambda c: c.dim["K"] > 0,
    "eps must be positive": lambda c: c.arg.eps > 0,
    "state must not overlap itself": _apart,
}
