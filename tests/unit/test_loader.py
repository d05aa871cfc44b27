"""What a configuration file may say, and what the loader answers to one that says something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.build import schema_options
from configs.loader import ConfigError, config_from_dict, config_to_dict, load_config
from configs.schema import CacheConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """The loader's message for a file that it must refuse."""
    with pytest.raises(ConfigError) as refused:
        load_config(write(folder, text), overrides)
    return str(refused.value)


def test_a_file_with_a_model_alone_keeps_every_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "model: {path: org/model}\n"))
    assert config.model.path == "org/model"
    assert config == config_from_dict({"model": {"path": "org/model"}})
    assert config.cache.block_size == 256


def test_a_section_that_is_present_but_empty_keeps_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "model: {path: m}\ncache:\n")).cache == CacheConfig()


def test_an_unknown_option_is_refused_with_the_nearest_name_and_the_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model:\n  path: m\ncache:\n  blok_size: 16\n")
    assert message == f"{tmp_path}/deployment.yaml:4: unknown option cache.blok_size; did you mean cache.block_size?"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("chache: {}", "cache"), ("port: 80", "ingress.port"), ("model: {block_size: 16}", "cache.block_size")],
)
def test_an_unknown_option_is_pointed_to_the_section_it_belongs_to(tmp_path: Path, wrong: str, meant: str) -> None:
    assert refusal(tmp_path, wrong).endswith(f"did you mean {meant}?")


def test_an_unknown_option_like_no_other_is_answered_with_the_sections(tmp_path: Path) -> None:
    assert "the sections are cache, cluster" in refusal(tmp_path, "qqqq: 1")


@pytest.mark.parametrize(
    ("option", "written", "message"),
    [
        ("cache.block_size", "0", "cache.block_size is 0; give a whole number from 1 to 4096"),
        ("cache.block_size", "'16'", "cache.block_size is '16'; give a whole number from 1 to 4096"),
        ("cache.block_size", "16.0", "cache.block_size is 16.0; give a whole number from 1 to 4096"),
        ("cache.block_size", "true", "cache.block_size is true; give a whole number from 1 to 4096"),
        ("cache.block_size", "", "cache.block_size is null; give a whole number from 1 to 4096"),
        ("cache.watermark", "0.7", "cache.watermark is 0.7; give a number from 0.0 to 0.5"),
        ("cache.watermark", ".nan", "cache.watermark is nan; give a number from 0.0 to 0.5"),
        ("cluster.heartbeat_s", ".inf", "cluster.heartbeat_s is inf; give a number of at least 0.05"),
        ("scheduler.one_step_ahead", "1", "scheduler.one_step_ahead is 1; give true or false"),
        ("model.dtype", "fp32", "model.dtype is 'fp32'; give one of auto, float32, bfloat16, float16"),
        ("model.max_model_len", "0", "model.max_model_len is 0; give a whole number of at least 1, or null"),
        ("model.served_name", "7", "quotes"),
        ("worker.env", "{OMP_NUM_THREADS: 1}", "quotes"),
        ("worker.env", '{A: "x\\0"}', "a mapping of text to text"),
        ("ingress.host", '"a\\0b"', r"ingress.host is 'a\x00b'; give text without null bytes"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_its_line_and_what_is_legal(
    tmp_path: Path, option: str, written: str, message: str
) -> None:
    section, name = option.split(".")
    model = "  path: m" if section == "model" else "model: {path: m}"
    said = refusal(tmp_path, f"# line 1\n{section}:\n  {name}: {written}\n{model}\n")
    assert said.startswith(f"{tmp_path}/deployment.yaml:3: ")
    assert message in said


def test_a_missing_model_is_refused_with_what_to_give(tmp_path: Path) -> None:
    for text in ("", "# nothing yet\n", "cache: {block_size: 16}\n", "model:\n"):
        assert "model.path is missing; give its hub id" in refusal(tmp_path, text)


def test_an_option_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model: {path: m}\ncache:\n  block_size: 16\n  block_size: 32\n")
    assert f"deployment.yaml:4: cache.block_size is given twice, first at {tmp_path}/deployment.yaml:3" in message


@pytest.mark.parametrize(
    "text",
    ["model: [", "a: b: c", "\x00", "- model", "just words", "model: &a {path: *a}", "? {a: b}\n: c", "--- 1\n--- 2\n"],
)
def test_a_file_that_is_no_mapping_of_options_is_one_clear_error(tmp_path: Path, text: str) -> None:
    assert "deployment.yaml" in refusal(tmp_path, text)


def test_an_anchor_that_contains_itself_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(tmp_path, "model: &a {path: *a}\n")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        load_config(path)


def test_a_missing_file_is_answered_with_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; give a YAML file or one of the presets .*smollm2-135m-cpu"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_a_cache_that_the_configured_device_cannot_hold_is_refused_with_the_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, "model: {path: m}\nworker: {device: cpu}\ncache:\n  dtype: float16\n")
    assert message.startswith(f"{tmp_path}/deployment.yaml:4: cache.dtype float16 is not served by the C++ kernels")
    assert "is not served on a GPU" in refusal(tmp_path, "model: {path: m}", "cache.dtype=int8", "worker.device=cuda")
    gpu = ["worker.device=cuda", "cache.dtype=float16"]
    assert load_config(write(tmp_path, "model: {path: m}"), gpu).cache.dtype == "float16", "it may be the checkpoint's"
    assert "set model.dtype to float16" in refusal(tmp_path, "model: {path: m, dtype: float32}", *gpu)


def test_overrides_change_single_options_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ncache: {block_size: 16}\n")
    config = load_config(
        path, ["cache.block_size=32", "cache.block_size=64", "scheduler.one_step_ahead=false", "worker.env.A=b"]
    )
    assert (config.cache.block_size, config.scheduler.one_step_ahead) == (64, False)
    assert config.worker.env == {"A": "b"}
    assert load_config(path, ["cluster.address=10.0.0.1:6379"]).cluster.address == "10.0.0.1:6379"
    assert load_config(path, ["cluster.heartbeat_s=5e-1"]).cluster.heartbeat_s == 0.5
    assert load_config(path, ["model.max_model_len=null"]).model.max_model_len is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.blok_size=16", "unknown option cache.blok_size; did you mean cache.block_size?"),
        ("cache.block_size.deep=16", "unknown option cache.block_size.deep; block_size is not a section"),
        ("cache.block_size=0", "cache.block_size is 0; give a whole number from 1 to 4096"),
        ("cache.block_size", "write an override as section.option=value"),
        (".=1", "write an override as section.option=value"),
        ("model.path=[", "not valid YAML"),
        ("worker.env.A=1", "quotes"),
    ],
)
def test_a_wrong_override_is_refused_by_its_own_words(tmp_path: Path, override: str, message: str) -> None:
    said = refusal(tmp_path, "model: {path: m}\ncache: {block_size: 16}\n", override)
    assert said.startswith(f"--set {override}: ")
    assert message in said


def test_an_override_can_give_the_model_that_the_file_leaves_out(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ["model.path=org/model"]).model.path == "org/model"


@pytest.mark.parametrize("name", ["max_num_seqs", "max_prefill_chunk"])
def test_options_that_contradict_each_other_are_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, f"model: {{path: m}}\nscheduler:\n  {name}: 4096\n")
    assert f"deployment.yaml:3: scheduler.{name} is 4096" in message
    assert "lower the first to at most 2048, or raise the second to at least 4096" in message


def test_an_engine_id_that_could_not_name_an_actor_is_refused(tmp_path: Path) -> None:
    assert "letters, digits" in refusal(tmp_path, "model: {path: m}\ncluster: {engine_id: a/b}\n")


def test_a_relative_model_file_starts_from_the_files_folder_whatever_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "configs").mkdir()
    path = write(tmp_path / "configs", "model: {path: ../models/m.gguf, cache_dir: ../cache}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(os.path.relpath(path))
    assert config.model.path == str(tmp_path / "models" / "m.gguf")
    assert config.model.cache_dir == str(tmp_path / "cache")
    assert load_config(path, ["model.path=./m"]).model.path == str(tmp_path / "elsewhere" / "m")


def test_a_hub_id_stays_as_it_is_and_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(write(tmp_path, "model: {path: org/model}")).model.path == "org/model"
    assert load_config(write(tmp_path, "model: {path: ~/m}")).model.path == str(tmp_path / "m")


def test_a_preset_is_found_by_its_bare_name_but_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("smollm2-135m-cpu").model.served_name == "smollm2-135m-instruct"
    (tmp_path / "smollm2-135m-cpu").write_text("model: {path: mine}")
    assert load_config("smollm2-135m-cpu").model.path == "mine"


def test_every_option_is_described() -> None:
    assert [option.path for option in schema_options() if not option.doc] == []


def test_every_default_is_legal() -> None:
    defaults = config_to_dict(config_from_dict({"model": {"path": "m"}}))
    for option in schema_options():
        section, name = option.path.split(".")
        assert option.accepts(defaults[section][name]), option.path


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.dictionaries(
            st.sampled_from(["model", "path", "cache", "block_size", "worker", "env", "x"]), inner
        ),
        max_leaves=8,
    )
)
def test_any_data_gives_a_configuration_or_a_config_error(data: object) -> None:
    try:
        config = config_from_dict(data)  # type: ignore[arg-type]
    except ConfigError:
        return
    assert config_from_dict(config_to_dict(config)) == config
