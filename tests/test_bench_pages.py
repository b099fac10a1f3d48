"""The tables of docs/kernels are those of the baseline."""

import copy
import json

import pytest

from bench import pages

OPS = json.loads(pages.BASELINE.read_text())["ops"]
MARKED = "before\n\n<!-- baselines: sdpa_decode merge_partials -->\n<!-- /baselines -->\n\nafter\n"


@pytest.mark.parametrize("file", sorted(pages.PAGES.glob("*.md")), ids=lambda file: file.stem)
def test_the_tables_of_a_page_are_current(file):
    page = file.read_text("utf-8")
    assert pages.rewritten(page, OPS) == page, "run python -m bench.pages"


def test_a_page_is_written_once_and_keeps_what_is_around():
    page = pages.rewritten(MARKED, OPS)
    assert page.startswith(
        "before\n\n<!-- baselines: sdpa_decode merge_partials -->\n\n`sdpa_decode` on an NVIDIA H200"
    )
    assert page.endswith("|\n\n<!-- /baselines -->\n\nafter\n")
    assert page.count("|case|us|rate|best peer / ours|") == 2
    assert pages.rewritten(page, OPS) == page


@pytest.mark.parametrize(
    "change", [{"us": 1234.5}, {"rate": "9.99 TB/s"}, {"peers": {"FA9": {"us": 1.0, "ratio": 0.12}}}]
)
def test_a_changed_baseline_makes_a_page_old(change, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    baseline = tmp_path / "baseline.json"
    page.write_text(MARKED)
    baseline.write_text(json.dumps({"ops": OPS}))
    for name, value in (("ROOT", tmp_path), ("PAGES", page.parent), ("BASELINE", baseline)):
        monkeypatch.setattr(pages, name, value)
    assert pages.main("--check") == 1 and page.read_text() == MARKED
    assert pages.main() == 0 and pages.main("--check") == 0
    ops = copy.deepcopy(OPS)
    ops["merge_partials"]["lines"][0].update(change)
    baseline.write_text(json.dumps({"ops": ops}))
    written = page.read_text()
    capsys.readouterr()
    assert pages.main("--check") == 1 and page.read_text() == written
    assert capsys.readouterr().out == "docs/page.md: old\n"
    assert pages.main() == 0 and page.read_text() != written and pages.main("--check") == 0


@pytest.mark.parametrize(
    ("page", "phrase"),
    [
        (MARKED.replace("merge_partials", "no_such_op"), "no baseline of 'no_such_op'"),
        (MARKED.replace("<!-- /baselines -->", ""), "has no <!-- /baselines -->"),
    ],
)
def test_a_wrong_marker_is_an_error(page, phrase):
    with pytest.raises(ValueError, match=phrase):
        pages.rewritten(page, OPS)


def test_rows_are_chosen_by_position():
    assert pages.spread(list(range(16)), 16) == list(range(16))
    chosen = pages.spread(list(range(40)), 16)
    assert len(set(chosen)) == 16 and chosen == sorted(chosen) and (chosen[0], chosen[-1]) == (0, 39)
    assert {b - a for a, b in zip(chosen, chosen[1:], strict=False)} <= {2, 3}


def test_the_best_peer_is_the_fastest_that_has_a_time():
    line = {"peers": {"A": {"us": 3.0, "ratio": 1.5}, "B": {"us": 2.0, "ratio": 0.987}, "C": {"error": "refused"}}}
    assert pages.peer(line) == "0.99 B"
    assert pages.peer({"peers": {}}) == "-"
