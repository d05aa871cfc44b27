"""Bars out of a comparison's records: the numbers are those of the tables, and the files can be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.plot import Bar, figures_of, main, plot, ratios_between


def record(system: str, seed: int, **workloads: dict[str, float]) -> dict[str, Any]:
    runs = {name: [{"wall_s": 1.0, "errors": [], **figures}] for name, figures in workloads.items()}
    return {"system": system, "version": "1", "seed": seed, "workloads": runs}


RECORDS = [
    record("ours-int8", 0, W4={"output_tokens_per_s": 100.0, "ttft_p50_ms": 20.0}, W2={"output_tokens_per_s": 380.0}),
    record("llama-q8_0", 0, W4={"output_tokens_per_s": 50.0, "ttft_p50_ms": 10.0}, W2={"output_tokens_per_s": 4.0}),
    record("ours-int8", 1, W4={"output_tokens_per_s": 120.0, "ttft_p50_ms": 30.0}),
    record("llama-q8_0", 1, W4={"output_tokens_per_s": 30.0, "ttft_p50_ms": 10.0}),
    {"system": "vllm-fp32", "version": "1", "seed": 0, "error": "ended with 1"},
]


def test_bars_are_medians_with_the_range_of_the_repeats() -> None:
    figures = figures_of(RECORDS)
    assert list(figures) == ["output tok/s", "TTFT p50, ms"]
    assert figures["output tok/s"]["W4"] == {"ours-int8": Bar(110.0, 100.0, 120.0), "llama-q8_0": Bar(40.0, 30.0, 50.0)}
    assert list(figures["TTFT p50, ms"]) == ["W4"]


def test_ratios_are_of_the_same_repeat_and_more_is_better() -> None:
    ratios = ratios_between(RECORDS)
    assert ratios["output tok/s"]["W4"] == {"ours-int8 / llama-q8_0": Bar(3.0, 2.0, 4.0)}
    assert ratios["TTFT p50, ms"]["W4"]["ours-int8 / llama-q8_0"].value == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_nothing_finished_is_an_error_and_so_is_another_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(RECORDS[-1:], tmp_path, "x", "x")
    for content in ("{", "[1]", '{"a": 1}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(SystemExit, match=r"give what benchmarks\.peers\.compare wrote"):
            main([str(tmp_path / "x.json")])


def test_without_matplotlib_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "x.json").write_text(json.dumps(RECORDS))
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[benchmarks\]'"):
        main([str(tmp_path / "x.json")])


def test_the_same_records_make_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "peers.json").write_text(json.dumps(RECORDS))
    for folder in ("a", "b"):
        assert main([str(tmp_path / "peers.json"), "--out", str(tmp_path / folder), "--title", "two cores"]) == 0
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["peers-figures.svg", "peers-ratios.svg"]
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    figures, ratios = texts(tmp_path / "a" / "peers-figures.svg"), texts(tmp_path / "a" / "peers-ratios.svg")
    assert {"two cores", "output tok/s", "W4", "W2", "ours-int8", "llama-q8_0", "110", "380"} <= figures
    assert "vllm-fp32" not in figures
    assert {"TTFT p50: times better", "ours-int8 / llama-q8_0", "3", "0.417", "95"} <= ratios
    assert {"2", "100", "500"} <= figures  # 4 and 380 on one axis: a logarithmic one


def texts(file: Path) -> set[str]:
    elements = ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
    return {element.text for element in elements if element.text}


def test_one_system_alone_has_no_ratios(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = plot([each for each in RECORDS if each["system"] == "ours-int8"], tmp_path, "x", "x")
    assert [file.name for file in made] == ["x-figures.svg"]
