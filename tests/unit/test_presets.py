"""The presets load, and the pages written from the schema are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.loader import PRESETS, config_from_dict, config_to_dict, load_config, preset_names
from configs.reference import reference_page

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_and_survives_the_way_to_another_process(name: str) -> None:
    config = load_config(name)
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_at_its_top_what_it_is_for(name: str) -> None:
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


def test_the_presets_are_those_that_the_documents_promise() -> None:
    assert preset_names() == ["one-gpu", "smollm2-135m-cpu", "tiny-random", "tp8", "two-replicas"]


def test_the_demo_runs_the_model_that_make_model_obtains() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    demo = load_config("smollm2-135m-cpu")
    assert f"MODEL  := {Path(demo.model.path).relative_to(REPOSITORY)}\n" in makefile
    assert demo.worker.device == "cpu"
    assert demo.model.dtype == "float32"


def test_gpu_presets_use_blocks_that_flash_attention_serves() -> None:
    for name in preset_names():
        config = load_config(name)
        if config.worker.device == "cuda":
            assert config.cache.block_size % 256 == 0, name


def test_the_reference_page_is_what_the_schema_says() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_page(), "run: python -m configs.reference > docs/configuration.md"
