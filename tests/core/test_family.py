"""What an op's ``build`` does once, and what for every call."""

from types import SimpleNamespace

from torch_attnkit.core.family import solved_by
from torch_attnkit.core.target import Target


def test_a_call_becomes_a_problem_once_and_its_tensors_operands_every_time():
    seen = []

    def launcher(problem, target):
        seen.append((problem, target))
        return seen.append

    build = solved_by(launcher, lambda call: call.dim["K"], lambda x, out: {"x": x, "out": out})
    launch = build(SimpleNamespace(dim={"K": 7}), Target("sm90"))
    assert seen == [(7, Target("sm90"))]
    assert launch("a", "b") is None
    launch("c", "d")
    assert seen[1:] == [{"x": "a", "out": "b"}, {"x": "c", "out": "d"}]
