"""Charts of a bench result: ``python -m bench.plot RESULT.json OUT_FOLDER`` (needs matplotlib).

``overview.png`` has a small chart for each op: the fastest peer's time in units of ours, one dot a case, with a line at
1. ``roofline.svg`` places every case between the limits measured in its run; ``ratios.svg``, ``ratios_experts.svg`` and
``ratios_dsv4.svg`` show every peer, one dot a peer and case. A chart without a dot is not drawn.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bench"})  # text as text, names as in every run
plt.rcParams["font.sans-serif"] = ["DejaVu Sans", "Verdana"]
_FAMILY = "font-family: 'DejaVu Sans', 'Verdana', sans-serif"  # as it stands in an SVG
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
# Of everything with a colour of its own: past the last colour the next shape begins.
_MARKS = [dict(color=color, marker=shape) for shape in "oDs^" for color in _COLORS]

# Beginnings of the ops whose ratios have a chart of their own; what no chart names is in ratios.svg.
_CHARTS = {
    "ratios_experts.svg": ("fp4_moe", "route_", "nvfp4_", "mxfp4_"),
    "ratios_dsv4.svg": ("sparse_fmha", "indexer_", "kv_cache_", "inverse_rope_fp4", "grouped_output"),
}


def records(file: Path) -> list[dict[str, Any]]:
    """The results of one file, a baseline or a single run, without the lines that have no number."""
    read = json.loads(file.read_text())
    found = list(read["ops"].values()) if "ops" in read else [read]
    return [r | {"lines": [x for x in r["lines"] if "us" in x]} for r in found if r["lines"]]


def _save(figure: Figure, file: Path) -> None:
    """An SVG in tenths of a point, without comments and names, and with what all of a kind have said once."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    short = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    short = re.sub(r' transform="rotate\(-0 [^)]*\)"|(?<=<g) id="[a-z0-9]+_\d+"', "", short)
    short = re.sub(r'style="fill: (#\w+); stroke: \1"', r'fill="\1"', short)
    short = short.replace(f"; {_FAMILY}", "").replace("*{stroke", f"text{{{_FAMILY}}} *{{stroke", 1)
    short = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\.\d)\d+", r"\1", " ".join(tag[0].split())), short)
    file.write_text(re.sub(r"\s*\n\s*", "\n", short), "utf-8")


def roofline(found: list[dict[str, Any]], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    limits = {k: max(r["limits"][k] for r in found) for k in ("copy", "bf16")}
    intensity = np.logspace(-1.5, 4, 200)  # FLOP a byte
    roof = np.minimum(intensity * limits["copy"], limits["bf16"])
    axes.plot(intensity, roof, color="black", linewidth=1.2)
    axes.text(0.04, 0.055 * limits["copy"], f"copy {limits['copy']:.2f} TB/s", rotation=33, fontsize=8)
    axes.text(4e2, limits["bf16"] * 1.1, f"bf16 product {limits['bf16']:.0f} TFLOP/s", fontsize=8)
    for mark, record in zip(_MARKS, found, strict=False):
        lines = [x for x in record["lines"] if x["dtype"] != "float8_e4m3fn"]  # whose products have another limit
        axes.scatter(
            [x["flops"] / x["bytes"] for x in lines], [x["tflop_s"] for x in lines], s=22, **mark,
            label=lines[0]["op"] if lines else None,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=f"{found[0]['device']}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=6, ncols=2)
    _save(figure, file)


def overview(found: list[dict[str, Any]], file: Path) -> None:
    """Small enough for the first screen of the README."""
    parts = []
    for record in found:
        peers = ([p["ratio"] for p in x["peers"].values() if "ratio" in p] for x in record["lines"])
        best = sorted(min(ratios) for ratios in peers if ratios)
        if best:
            parts.append((record["lines"][0]["op"], best))
    columns = 5
    rows = -(-len(parts) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(10, 0.2 + 0.72 * rows), sharex=True, layout="constrained")
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    for axes, (op, best) in zip(grid.flat, parts, strict=False):
        axes.scatter(np.clip(best, 0.4, 6), np.linspace(0, 1, len(best)), s=7, color=_COLORS[0], zorder=3)
        axes.axvline(1, color="black", linewidth=0.9)
        axes.set(xscale="log", xlim=(0.38, 6.3), ylim=(-0.25, 1.25), yticks=[])
        axes.set_title(op, fontsize=7.5, pad=2)
        axes.set_xticks((0.5, 1, 2, 5), ("0.5", "1", "2", "5"), fontsize=6.5)
        axes.minorticks_off()
        axes.grid(True, axis="x", alpha=0.3)
    figure.supxlabel(f"{found[0]['device']}: the fastest peer's time / ours, one dot a case", fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def ratios(found: list[dict[str, Any]], file: Path) -> bool:
    """Whether there was anything to draw."""
    lines = [x for record in found for x in record["lines"] if any("ratio" in p for p in x["peers"].values())]
    names = list(dict.fromkeys(n for x in lines for n, p in x["peers"].items() if "ratio" in p))
    if not lines:
        return False
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.15 * len(lines)), layout="constrained")
    for mark, name in zip(_MARKS, names, strict=False):
        at = [(x["peers"][name]["ratio"], row) for row, x in enumerate(lines) if "ratio" in x["peers"].get(name, {})]
        axes.scatter(*zip(*at, strict=True), s=26, label=name, zorder=3, **mark)
    codes = {"float8_e4m3fn": " E4M3"}  # most lines are bf16
    labels = [f"{x['op']} {x['case']}{codes.get(x['dtype'], '')}" for x in lines]
    axes.set_yticks(range(len(lines)), labels, fontsize=7)
    axes.margins(y=0.01)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="peer's time / ours (more than 1: ours is faster)", title=f"{found[0]['device']}")
    ticks = (0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20)
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.grid(True, axis="x", alpha=0.3)
    axes.tick_params(axis="y", left=False)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower right")
    left, right = axes.get_xlim()  # the lines of all rows are one path
    nothing = np.full(len(lines), np.nan)
    across = np.stack([np.full(len(lines), left), np.full(len(lines), right), nothing], 1).ravel()
    axes.plot(across, np.repeat(np.arange(len(lines)), 3), color="#dddddd", linewidth=0.5, zorder=0)
    axes.set_xlim(left, right)
    _save(figure, file)
    return True


def charts(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The records of each chart of ratios."""
    parts: dict[str, list[dict[str, Any]]] = {"ratios.svg": [], **{name: [] for name in _CHARTS}}
    for record in found:
        op = record["lines"][0]["op"] if record["lines"] else ""
        name = next((n for n, ops in _CHARTS.items() if op.startswith(ops)), "ratios.svg")
        parts[name].append(record)
    return parts


def main(result: str, folder: str) -> None:
    found, out = records(Path(result)), Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    overview(found, out / "overview.png")
    roofline(found, out / "roofline.svg")
    written = [name for name, part in charts(found).items() if ratios(part, out / name)]
    print(f"wrote {', '.join(['overview.png', 'roofline.svg', *written])} to {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
