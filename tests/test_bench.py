"""What a run of some of an op's cases leaves in the baseline."""

from bench.__main__ import merged


def _line(case: str, us: float, dtype: str = "bfloat16") -> dict:
    return {"op": "o", "case": case, "dtype": dtype, "us": us}


def _record(commit: str, *lines: dict, device: str = "d") -> dict:
    return {"device": device, "commit": commit, "lines": list(lines)}


def test_lines_of_other_runs_stay_and_say_which():
    cases = ["a", "b", "c"]
    first = merged(None, _record("1", _line("a", 1.0), _line("b", 2.0), _line("gone", 3.0)), cases)
    assert first == _record("1", _line("a", 1.0), _line("b", 2.0))
    second = merged(first, _record("2", _line("c", 5.0), _line("b", 4.0)), cases)
    assert second == _record("2", _line("a", 1.0) | {"run": {"commit": "1"}}, _line("b", 4.0), _line("c", 5.0))
    third = merged(second, _record("3", _line("c", 6.0), device="e"), cases)
    runs = [line.get("run") for line in third["lines"]]
    assert runs == [{"commit": "1", "device": "d"}, {"commit": "2", "device": "d"}, None]


def test_dtypes_are_lines_of_their_own():
    first = merged(None, _record("1", _line("a", 1.0)), ["a"])
    both = merged(first, _record("1", _line("a", 2.0, "float16")), ["a"])["lines"]
    assert [(line["dtype"], line["us"]) for line in both] == [("bfloat16", 1.0), ("float16", 2.0)]
