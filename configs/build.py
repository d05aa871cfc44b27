"""Plain data to schema objects and back, checked against the schema's own types and ranges.

Owns what an option's error says. Knows no file format: where a value was written comes in as `origins`, a map from
dotted path to a place such as `demo.yaml:7`.
"""

from __future__ import annotations

import difflib
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from configs.cache_dtype import refusal
from configs.schema import EngineConfig

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says where, what, and what would be legal."""


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of the schema, by its dotted path."""

    path: str
    hint: Any
    field: Field[Any]

    @property
    def is_optional(self) -> bool:
        return types.NoneType in get_args(self.hint)

    @property
    def type(self) -> Any:
        """The type without `None`."""
        if not self.is_optional:
            return self.hint
        return next(kind for kind in get_args(self.hint) if kind is not types.NoneType)

    @property
    def doc(self) -> str:
        return str(self.field.metadata.get("doc", ""))

    @property
    def is_required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    def legal_values(self) -> str:
        """In words: `a whole number from 1 to 4096`."""
        if get_origin(self.type) is Literal:
            words = "one of " + ", ".join(str(choice) for choice in get_args(self.type))
        elif get_origin(self.type) is dict:
            words = "a mapping of text to text"
        else:
            words = _WORDS[self.type]
        ge, le = self.field.metadata.get("ge"), self.field.metadata.get("le")
        if ge is not None and le is not None:
            words += f" from {ge} to {le}"
        elif ge is not None:
            words += f" of at least {ge}"
        return f"{words}, or null" if self.is_optional else words

    def accepts(self, value: Any) -> bool:
        """Whether `value` has the type and lies in the range."""
        if value is None:
            return self.is_optional
        kind = self.type
        if get_origin(kind) is Literal:
            return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
        if get_origin(kind) is dict:
            texts = [text for item in value.items() for text in item] if isinstance(value, dict) else [None]
            return all(isinstance(text, str) and "\0" not in text for text in texts)
        if isinstance(value, bool) and kind is not bool:
            return False
        if not isinstance(value, (int, float) if kind is float else kind):
            return False
        if isinstance(value, str):
            return "\0" not in value
        return not isinstance(value, (int, float)) or self._is_in_range(value)

    def _is_in_range(self, value: float) -> bool:
        ge, le = self.field.metadata.get("ge"), self.field.metadata.get("le")
        return abs(value) <= sys.float_info.max and (ge is None or value >= ge) and (le is None or value <= le)


def schema_options(schema: type = EngineConfig, prefix: str = "") -> Iterator[Option]:
    """Every option of the schema, in the order in which it is written there."""
    hints = typing.get_type_hints(schema)
    for field in fields(schema):
        path = f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            yield from schema_options(hints[field.name], f"{path}.")
        else:
            yield Option(path, hints[field.name], field)


def config_from_dict(data: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> EngineConfig:
    """The configuration that `data` describes; what it leaves out keeps the schema's default.

    Raises:
        ConfigError: an unknown option, a wrong type, a value out of range, or values that contradict each other.
    """
    builder = _Builder(origins or {})
    config: EngineConfig = builder.section(EngineConfig, data, "")
    builder.check_consistency(config)
    return config


def config_to_dict(config: EngineConfig) -> dict[str, Any]:
    """Plain data, for another process or a file; `config_from_dict` gives an equal object back."""
    return asdict(config)


def _nearest(path: str, known_paths: list[str]) -> str | None:
    """The option of the same name in another section, else the one spelt most alike."""
    by_name = {known.rpartition(".")[2]: known for known in reversed(known_paths)}
    name = path.rpartition(".")[2]
    if name in by_name:
        return by_name[name]
    alike = difflib.get_close_matches(path, known_paths, n=1)
    alike = alike or [by_name[close] for close in difflib.get_close_matches(name, by_name, n=1)]
    return alike[0] if alike else None


def _is_keyword(value: Any) -> bool:
    return value is None or isinstance(value, bool)


class _Builder:
    """Builds section after section; every refusal names its place."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self.origins = origins
        self.options = {option.path: option for option in schema_options()}

    def fail(self, path: str, problem: str) -> typing.NoReturn:
        place = path
        while place not in self.origins and place:
            place = place.rpartition(".")[0]
        origin = self.origins.get(place)
        raise ConfigError(f"{origin}: {problem}" if origin else problem)

    def section(self, schema: type, data: Any, path: str) -> Any:
        """One dataclass of the schema. A section that is present but empty is all defaults."""
        prefix = f"{path}." if path else ""
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            self.fail(path, f"{path or 'the configuration'} is {data!r}; give a mapping of options to values")
        hints = typing.get_type_hints(schema)
        for name in data:
            if name not in hints:
                self.fail(f"{prefix}{name}", self._unknown(f"{prefix}{name}"))
        values: dict[str, Any] = {}
        for field in fields(schema):
            option_path = f"{prefix}{field.name}"
            if is_dataclass(hints[field.name]):
                values[field.name] = self.section(hints[field.name], data.get(field.name), option_path)
            elif field.name in data:
                values[field.name] = self.value(self.options[option_path], data[field.name])
            elif self.options[option_path].is_required:
                self.fail(path, f"{option_path} is missing; give its {self.options[option_path].doc}")
        return schema(**values)

    def value(self, option: Option, value: Any) -> Any:
        if not option.accepts(value):
            shown = {None: "null", True: "true", False: "false"}[value] if _is_keyword(value) else repr(value)
            remedy = f"give {option.legal_values()}"
            wants_text = option.type is str or get_origin(option.type) is dict
            if isinstance(value, str) and "\0" in value:
                remedy += " without null bytes"
            elif wants_text and value is not None and not isinstance(value, str):
                remedy += "; put quotes around a value that YAML reads as something else"
            self.fail(option.path, f"{option.path} is {shown}; {remedy}")
        return float(value) if option.type is float and value is not None else value

    def _unknown(self, path: str) -> str:
        sections = sorted({known.partition(".")[0] for known in self.options})
        near = _nearest(path, [*self.options, *sections])
        return f"unknown option {path}; " + (
            f"did you mean {near}?" if near else f"the sections are {', '.join(sections)}"
        )

    def check_consistency(self, config: EngineConfig) -> None:
        """What no single option can tell."""
        scheduler = config.scheduler
        budget = scheduler.max_num_batched_tokens
        for name, meaning in (("max_num_seqs", "running sequences"), ("max_prefill_chunk", "tokens of one prompt")):
            value = getattr(scheduler, name)
            if value > budget:
                written = [p for p in (f"scheduler.{name}", "scheduler.max_num_batched_tokens") if p in self.origins]
                self.fail(
                    written[0] if written else "scheduler",
                    f"scheduler.{name} is {value}, but one step computes scheduler.max_num_batched_tokens = {budget} "
                    f"tokens and must have room for that many {meaning}; lower the first to at most {budget}, or "
                    f"raise the second to at least {value}",
                )
        self._check_cache_dtype(config)
        engine_id = config.cluster.engine_id
        if engine_id is not None and not _ENGINE_ID.fullmatch(engine_id):
            self.fail(
                "cluster.engine_id",
                f"cluster.engine_id is {engine_id!r}; give 1 to 63 letters, digits, dots, dashes or underscores, "
                "the first a letter or a digit",
            )

    def _check_cache_dtype(self, config: EngineConfig) -> None:
        """As far as it can be told before device and checkpoint are known; `cluster.preflight` knows both."""
        device, dtype = config.worker.device, config.cache.dtype
        if device == "auto" or dtype == "auto":
            return
        known = device == "cpu" or config.model.dtype != "auto"
        problem = refusal(
            dtype,
            device=device,
            model_dtype=config.model.dtype_on(device, "") if known else None,
            cpu_kernels=config.worker.cpu_kernels,
        )
        if problem is not None:
            self.fail("cache.dtype", problem)
