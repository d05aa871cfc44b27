"""Bars out of a comparison's records: the numbers are those of the tables. The files: `tests/test_plot_files.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.plot import Bar, figures_of, main, ratios_between
from tests.support.comparison_records import RECORDS


def test_bars_are_medians_with_the_range_of_the_repeats() -> None:
    figures = figures_of(RECORDS)
    assert list(figures) == ["output tok/s", "TTFT p50, ms"]
    assert figures["output tok/s"]["W4"] == {"ours-int8": Bar(110.0, 100.0, 120.0), "llama-q8_0": Bar(40.0, 30.0, 50.0)}
    assert list(figures["TTFT p50, ms"]) == ["W4"]


def test_ratios_are_of_the_same_repeat_and_more_is_better() -> None:
    ratios = ratios_between(RECORDS)
    assert ratios["output tok/s"]["W4"] == {"ours-int8 / llama-q8_0": Bar(3.0, 2.0, 4.0)}
    assert ratios["TTFT p50, ms"]["W4"]["ours-int8 / llama-q8_0"].value == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_without_matplotlib_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "x.json").write_text(json.dumps(RECORDS))
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[benchmarks\]'"):
        main([str(tmp_path / "x.json")])
