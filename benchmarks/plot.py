"""A comparison of servers as bars: SVG files out of the JSON that `benchmarks.peers.compare` writes.

    python -m benchmarks.plot build/peers.json --out benchmarks/results --name 2026-12-01-vllm

Makes NAME-figures.svg, what each system reached on each workload, and NAME-ratios.svg, how many times better ours is
than each peer, both with the range over the repeats. The definitions are those of the tables
(`benchmarks.peers.comparison`). The same JSON gives the same files, byte for byte. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers.comparison import FIGURES, OURS, Record, pairs_of, ratios_of, runs_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = ("output_tokens_per_s", "cold_ttft_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p50_ms", "itl_p99_ms")
NUM_COLUMNS = 2
LOG_FROM = 20.0  # values further apart than this get a logarithmic axis
BLUES, OTHERS = ("#1f4e9c", "#5b8bd6", "#a5c4f0"), ("#d9822b", "#4d9a57", "#8b6bb5", "#c25450", "#8a8a8a", "#c9a227")


@dataclass(frozen=True, slots=True)
class Bar:
    value: float  # the median
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Bar:
        return cls(median(values), min(values), max(values))


Panel = dict[str, dict[str, Bar]]
"""Workload -> system, or pair of systems -> its bar."""
Panels = dict[str, Panel]
"""Name of a figure -> its panel; those without any bar are left out."""


def figures_of(records: Sequence[Record]) -> Panels:
    """What each system reached."""
    systems = list(dict.fromkeys(record["system"] for record in records))

    def values(system: str, workload: str, key: str) -> list[float]:
        runs = runs_of(records, system, workload).values()
        return [run[key] for run in runs if run.get(key)]

    return _panels(records, systems, values)


def ratios_between(records: Sequence[Record]) -> Panels:
    """How many times better the first of a pair is; more is better, whatever the figure."""
    systems = list(dict.fromkeys(record["system"] for record in records))
    pairs = {f"{own} / {peer}": (own, peer) for own, peer in pairs_of(systems)}

    def values(pair: str, workload: str, key: str) -> list[float]:
        own, peer = (runs_of(records, system, workload) for system in pairs[pair])
        return ratios_of(own, peer, key)

    return _panels(records, list(pairs), values)


def _panels(records: Sequence[Record], series: Sequence[str], values: Callable[[str, str, str], list[float]]) -> Panels:
    workloads = list(dict.fromkeys(name for record in records for name in record.get("workloads", {})))
    panels: Panels = {}
    for key in SHOWN:
        panel: Panel = {}
        for workload in workloads:
            found = {name: values(name, workload, key) for name in series}
            if bars := {name: Bar.of(numbers) for name, numbers in found.items() if numbers}:
                panel[workload] = bars
        if panel:
            panels[FIGURES[key][0]] = panel
    return panels


def colours_of(series: Sequence[str]) -> dict[str, str]:
    """Our systems in blue, peers and pairs in other colours."""
    ours = [name for name in series if name.startswith(OURS) and "/" not in name]
    others = [name for name in series if name not in ours]
    return {name: BLUES[i % len(BLUES)] for i, name in enumerate(ours)} | {
        name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)
    }


def draw(panels: Panels, file: Path, title: str, *, are_ratios: bool) -> None:
    """One panel for each figure, in it a group of bars for each workload."""
    import matplotlib
    from matplotlib.figure import Figure

    series = list(dict.fromkeys(name for panel in panels.values() for bars in panel.values() for name in bars))
    colours = colours_of(series)
    num_rows = math.ceil(len(panels) / NUM_COLUMNS)
    with matplotlib.rc_context({"svg.hashsalt": file.name, "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(5.2 * NUM_COLUMNS, 2.5 * num_rows + 1.0), layout="constrained")
        axes = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flat
        for axis, (name, panel) in zip(axes, panels.items(), strict=False):
            axis.set_title(f"{name.removesuffix(', ms')}: times better" if are_ratios else name, fontsize=9)
            _draw_panel(axis, panel, colours, are_ratios=are_ratios)
        for axis in list(axes)[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(title)
        handles = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None})


def _draw_panel(axis: Axes, panel: Panel, colours: Mapping[str, str], *, are_ratios: bool) -> None:
    every = [bar for bars in panel.values() for bar in bars.values()]
    is_log = are_ratios or max(bar.most for bar in every) > LOG_FROM * min(bar.least for bar in every)
    bottom = 1.0 if are_ratios else min(bar.least for bar in every) / 2 if is_log else 0.0
    width = 0.8 / len(colours)
    for number, bars in enumerate(panel.values()):
        left = number - width * (len(bars) - 1) / 2
        for place, (name, bar) in enumerate(bars.items()):
            x = left + place * width
            axis.bar(x, bar.value - bottom, width * 0.92, bottom=bottom, color=colours[name])
            if bar.least < bar.most:
                axis.vlines(x, bar.least, bar.most, color="black", linewidth=0.8)
            up = bar.value >= bottom
            axis.annotate(
                short(bar.value),
                (x, bar.most if up else bar.least),
                (0, 1 if up else -1),
                textcoords="offset points",
                ha="center",
                va="bottom" if up else "top",
                fontsize=6,
            )
    if is_log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    if are_ratios:
        axis.axhline(1.0, color="black", linewidth=0.8)
    axis.margins(y=0.12)
    axis.set_xticks(range(len(panel)), list(panel))
    axis.spines[["top", "right"]].set_visible(False)


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def read_records(file: Path) -> list[Record]:
    """Raises: ValueError: not the records of a comparison."""
    try:
        records: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; give what benchmarks.peers.compare wrote") from error
    if not isinstance(records, list) or not all(isinstance(each, dict) and "system" in each for each in records):
        raise ValueError(f"{file} does not hold the records of a comparison; give what benchmarks.peers.compare wrote")
    return records


def plot(records: Sequence[Record], folder: Path, name: str, title: str) -> list[Path]:
    """The files that were made. Raises: ValueError: nothing to draw, or no matplotlib."""
    try:
        import matplotlib.patches  # noqa: F401
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install -e '.[benchmarks]'") from error
    figures, ratios = figures_of(records), ratios_between(records)
    if not figures:
        raise ValueError("no workload of any system was finished, so there is nothing to draw")
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / f"{name}-figures.svg"]
    draw(figures, made[0], title, are_ratios=False)
    if ratios:
        made.append(folder / f"{name}-ratios.svg")
        draw(ratios, made[1], title, are_ratios=True)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="what benchmarks.peers.compare --json wrote")
    parser.add_argument("--out", type=Path, help="folder; default: that of the JSON file")
    parser.add_argument("--name", help="how the files' names begin; default: as the JSON file's")
    parser.add_argument("--title", help="above the bars; default: the name")
    options = parser.parse_args(arguments)
    name = options.name or options.json.stem
    try:
        records = read_records(options.json)
        made = plot(records, options.out or options.json.parent, name, options.title or name)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
