"""One YAML file, and overrides on top of it, to one `EngineConfig`.

Owns the file format: finding a file or preset, YAML with line numbers, `section.option=value` overrides, and what a
relative path in a file is relative to. What is legal is decided by the schema (`configs.schema`, `configs.build`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.build import ConfigError, config_from_dict, config_to_dict
from configs.schema import EngineConfig

__all__ = ["ConfigError", "config_from_dict", "config_to_dict", "load_config", "preset_names"]

PRESETS = Path(__file__).parent / "presets"

_Place = Callable[[yaml.Mark], str]  # how a position in the text is named to the user

_MAX_DEPTH = 8  # the schema is three levels deep; this bounds recursion through anchors


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader that also reads `1e-3` as a number, as YAML 1.2 does."""


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> EngineConfig:
    """The configuration in the file `path`, or in the preset of that name, after `overrides` (`cache.block_size=16`).

    Where `model.path` begins with a dot or ends in `.gguf`, it is a local path and starts from the folder of the YAML
    file, or in an override from the working directory; so does `model.cache_dir`. Both may begin with `~`.

    Raises:
        ConfigError: no such file, no YAML, or not a legal configuration; names the file and the line.
    """
    file = _find(path)
    origins = {"": str(file)}
    data = _parse(_read(file), origins, place=lambda mark: f"{file}:{mark.line + 1}")
    if data is None:
        data = {}
    if isinstance(data, dict):
        _resolve_paths(data, file.parent)
        for override in overrides:
            _apply_override(data, origins, override)
        _resolve_paths(data, Path.cwd())
    return config_from_dict(data, origins)


def _find(path: str | Path) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file
    preset = PRESETS / f"{path}.yaml"
    if file.name == str(path) and preset.is_file():
        return preset
    kind = "is a directory" if file.is_dir() else "does not exist"
    raise ConfigError(f"{path} {kind}; give a YAML file or one of the presets {', '.join(preset_names())}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _parse(text: str, origins: dict[str, str], *, place: _Place, path: str = "") -> Any:
    """Plain data; `origins` gains the place of every key."""
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        return None if node is None else _plain(loader, node, origins, place, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{place(mark) if mark else origins['']}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise ConfigError(f"{origins['']}: not valid YAML: {error}") from error


def _plain(loader: _PlainLoader, node: yaml.Node, origins: dict[str, str], place: _Place, path: str) -> Any:
    here = place(node.start_mark)
    if path.count(".") >= _MAX_DEPTH:
        raise ConfigError(f"{here}: {path} is nested too deeply")
    if isinstance(node, yaml.SequenceNode):
        raise ConfigError(f"{here}: {path or 'the file'} is a list; no option takes one")
    if isinstance(node, yaml.ScalarNode):
        try:
            return loader.construct_object(node)
        except ValueError as error:  # a date that does not exist
            raise ConfigError(f"{here}: {path} is {node.value!r}; put quotes around it") from error
    data: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{place(key.start_mark)}: the name of an option must be text")
        key_path = f"{path}.{key.value}" if path else str(key.value)
        if key.value in data:
            raise ConfigError(
                f"{place(key.start_mark)}: {key_path} is given twice, first at {origins[key_path]}; remove one"
            )
        origins[key_path] = place(key.start_mark)
        data[key.value] = _plain(loader, value, origins, place, key_path)
    return data


def _apply_override(data: dict[str, Any], origins: dict[str, str], override: str) -> None:
    source = f"--set {override}"
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise ConfigError(f"{source}: write an override as section.option=value")
    *sections, name = path.split(".")
    target = data
    for depth, section in enumerate(sections, start=1):
        origins.setdefault(".".join(sections[:depth]), source)
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ConfigError(f"{source}: unknown option {path}; {section} is not a section")
    origins[path] = source
    target[name] = _parse(text, origins, place=lambda _mark: source, path=path)


def _resolve_paths(data: Any, base: Path) -> None:
    """Makes the model's local paths absolute, so that they mean the same in every process."""
    model = data.get("model") if isinstance(data, Mapping) else None
    if not isinstance(model, dict):
        return
    for name in ("path", "cache_dir"):
        value = model.get(name)
        if not isinstance(value, str) or not value:
            continue
        if name == "cache_dir" or value.startswith((".", "~")) or value.endswith(".gguf"):
            try:
                model[name] = str((base / Path(value).expanduser()).resolve())
            except (RuntimeError, ValueError, OSError) as error:  # no home directory; a null byte; a loop of links
                raise ConfigError(f"model.{name} is {value!r}, which is not a usable path: {error}") from error
