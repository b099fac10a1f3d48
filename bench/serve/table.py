"""Tables of the records of ``bench.serve``, with ratios to vLLM's own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Column, Table

from . import load, sameness

Records = dict[str, dict[str, Any]]
BASE = "vllm"
# Title, part, number of its record, digits, whether more is better.
_SPEED = (
    ("decode tok/s", "decode", "tokens_s", 0, True),
    ("decode ms a step", "decode", "ms", 2, False),
    ("one request, ms a token", "single", "ms", 2, False),
    ("prefill tok/s", "prefill", "tokens_s", 0, True),
    ("behind: tok/s", "behind", "tokens_s", 0, True),
    ("behind: ms a step", "behind", "ms", 2, False),
    ("long: tok/s", "long", "tokens_s", 0, True),
    ("long: ms a step", "long", "ms", 2, False),
    ("repeated: tok/s", "repeated", "tokens_s", 0, True),
    ("repeated: tokens a request's step", "repeated", "tokens_a_step", 2, True),
)
_SHOWN = 12  # kernels


def ratio(records: Records, case: str, number: Callable[[dict[str, Any]], float | None], more: bool) -> str:
    """How many times as fast as vLLM's own way a case is; empty where one of them has no number."""
    figure, base = number(records[case]), number(records.get(BASE, {"parts": {}}))
    if not figure or not base or case == BASE:
        return ""
    return f" ({figure / base if more else base / figure:.2f})"


def speed(title: str, records: Records) -> Table:
    """A row a case: what was measured, and in brackets how many times as fast as ``vllm`` that is."""
    shown = [line for line in _SPEED if any(line[1] in r["parts"] for r in records.values())]
    out = Table(
        *(Column(c, overflow="fold") for c in ("case", "attention", "graphs", "start s", *(line[0] for line in shown))),
        title=f"{title}; in brackets times as fast as {BASE}",
    )
    for case, record in records.items():
        cells = []
        for _, part, key, digits, more in shown:
            number = lambda r, part=part, key=key: r["parts"].get(part, {}).get(key)
            found = number(record)
            cells.append("-" if found is None else f"{found:.{digits}f}{ratio(records, case, number, more)}")
        engine = record.get("engine", {})
        start = f"{record['start_s']:.0f}" if "start_s" in record else "-"
        out.add_row(case, "+".join(engine.get("attention", [])), engine.get("graphs", "-"), start, *cells)
    return out


def without_texts(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "texts"}


def invariance(title: str, records: Records) -> Table | None:
    """How many places of requests have other bits than those of the request alone; None where no case says so."""
    columns = ("case", "served", "prompt tokens", "differ", "generated", "differ", "probabilities differ", "by at most")
    out = Table(*columns, title=f"{title}: bits of requests alone, and otherwise")
    for case, record in records.items():
        for how, found in record["parts"].get("invariant", {}).items():
            figures = ("prompt", "prompt_differ", "tokens", "tokens_differ", "likeliest_differ")
            out.add_row(case, how, *(str(found[key]) for key in figures), f"{found['largest']:.2g}")
    return out if out.row_count else None


def drafts(title: str, records: Records) -> Table | None:
    """Texts of cases with drafts beside the same without; None where there is no such pair."""
    columns = ("case", "drafted tokens taken", "texts equal", "tokens before the first other one")
    out = Table(*columns, title=f"{title}: texts with drafts and without")
    for case, record in records.items():
        plain = records.get(load.without_drafts(case) or "", {"parts": {}})["parts"].get("repeated")
        drafted = record["parts"].get("repeated")
        if plain and drafted:
            found = sameness.of_drafts(drafted["texts"], plain["texts"])
            taken = f"{drafted['taken']} of {drafted['tokens']}"
            pairs = (f"{found[a]} of {found[b]}" for a, b in (("equal", "requests"), ("same", "tokens")))
            out.add_row(case, taken, *pairs)
    return out if out.row_count else None


def distances(title: str, judged: dict[str, dict[str, Any]]) -> Table:
    """A row a case: how far log-probabilities are from float32."""
    columns = ("case", "given: mean", "max", "generated: mean", "max", "likeliest in float32, too")
    out = Table(*columns, title=f"{title}: distance of log-probabilities from float32")
    for case, found in judged.items():
        figures = (found[kind][key] for kind in ("given", "generated") for key in ("mean", "max"))
        out.add_row(case, *(f"{n:.2g}" for n in figures), f"{found['first']} of {found['places']}")
    return out


def profiles(title: str, records: Records) -> list[Table]:
    """A table a kind of step: cases side by side, the kernels of each by the time that they take."""
    shown = {case: r["profile"] for case, r in records.items() if r.get("profile")}
    kinds = list(dict.fromkeys(kind for found in shown.values() for kind in found))
    return [_profile(f"{title}, {kind}: a step", {c: p[kind] for c, p in shown.items() if kind in p}) for kind in kinds]


def _profile(title: str, found: dict[str, dict[str, Any]]) -> Table:
    out = Table("", *(Column(case, overflow="fold") for case in found), title=title)
    for name, describe in (
        ("wall ms", lambda p: f"{p['wall_ms']:.2f}"),
        ("GPU ms", lambda p: f"{p['gpu_ms']:.2f}"),
        ("kernels", lambda p: f"{p['kernels']:.0f}"),
        ("launches by the host", lambda p: f"{p['launches']:.1f}"),
        ("graph launches", lambda p: f"{p['graph_launches']:.1f}"),
    ):
        out.add_row(name, *(describe(p) for p in found.values()))
    out.add_section()
    for i in range(min(_SHOWN, max(len(p["top"]) for p in found.values()))):
        out.add_row(str(i + 1), *(_kernel(p["top"][i]) if i < len(p["top"]) else "" for p in found.values()))
    return out


def _kernel(line: dict[str, Any]) -> str:
    return f"{line['us']:.0f} us, {line['calls']:g} x {line['name']}"


def heading(records: Records) -> str:
    """Device and versions."""
    facts = next((r["facts"] for r in records.values() if "facts" in r), None)
    if facts is None:
        return "no case ended: device and versions are not known"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['device']}: {versions}; Python {facts['python']}"
