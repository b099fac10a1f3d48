"""Parity cases of the delta rule's ops test the arguments that they give: with others, something else comes out."""

from __future__ import annotations

import pytest
import torch

from torch_attnkit import parity
from torch_attnkit.core.dispatch import OPS

# Of an op a case, an argument, and what stands in for it.
CHANGES = {
    "gated_delta_step": [
        ("drafts", "accepted", None), ("odd", "qk_l2norm", True), ("odd", "scale", None),
        ("one-key", "beta_scale", 1.0),
    ],
    "kimi_delta_step": [
        ("drafts", "accepted", None), ("odd", "qk_l2norm", True), ("odd", "scale", None), ("glm", "lower_bound", None),
        ("wide", "lower_bound", None),
    ],
    "gated_delta_rule": [("borders", "past", None), ("plain", "qk_l2norm", True)],
    "causal_conv1d": [("borders", "past", None), ("two", "activation", "silu"), ("steps-four", "past", None)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case", "argument", "other"), [(name, *change) for name, of in CHANGES.items() for change in of]
)
def test_what_a_case_gives_changes_what_comes_out(name, case, argument, other):
    op, seen = OPS[name], 0
    for one in parity.cases(op, len(op.kernels) - 1, "metal", covering=True):
        if one.extra or not one.id.endswith(f"-{case}]"):
            continue
        found = []
        for changed in (False, True):
            args, kwargs = parity.arguments(one)
            given = dict(zip(op.argnames, args, strict=False)) | kwargs
            state = given["conv_state" if "conv_state" in given else "state"]
            assert given[argument] is not other
            out = getattr(torch.ops.attnkit, name)(**given | ({argument: other} if changed else {}))
            found.append(torch.cat([out.flatten().float(), state.flatten().float()]))
        assert not torch.equal(*found), one.id
        seen += 1
    assert seen
