"""The drawn bars of a comparison, for which matplotlib is needed: files that can be read, and always the same."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.plot import main, plot
from tests.support.comparison_records import RECORDS

pytest.importorskip("matplotlib")


def test_nothing_finished_is_an_error_and_so_is_another_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(RECORDS[-1:], tmp_path, "x", "x")
    for content in ("{", "[1]", '{"a": 1}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(SystemExit, match=r"give what benchmarks\.peers\.compare wrote"):
            main([str(tmp_path / "x.json")])


def test_the_same_records_make_the_same_files(tmp_path: Path) -> None:
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
    made = plot([each for each in RECORDS if each["system"] == "ours-int8"], tmp_path, "x", "x")
    assert [file.name for file in made] == ["x-figures.svg"]
