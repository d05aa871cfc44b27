"""Conversations to prompts, by the model's own Jinja template, in a sandbox.

Owns the template's environment. Finds the template in chat_template.jinja, chat_template.json or
tokenizer_config.json. Knows nothing of token ids.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from cluster.errors import InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt it is transparent."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """`render` is all. A model without a template cannot chat, and says so when asked."""

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        self.special_tokens = special_tokens
        self._template = None if source is None else _environment().from_string(source)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """Raises: ValueError, where the files are there and cannot be read."""
        config = _read_json(directory / "tokenizer_config.json")
        tokens = _read_json(directory / "special_tokens_map.json") | config
        special = {name: _content(tokens[name]) for name in _SPECIAL_TOKENS if tokens.get(name) is not None}
        try:
            return cls(_find_template(directory, config), special)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{directory}: the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        """The prompt's text, special tokens included.

        Raises:
            InvalidRequest: no template, or the template refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", parameter="messages")
        if continue_final_message:
            add_generation_prompt = False
        variables = {**arguments, **self.special_tokens, "messages": list(messages), "tools": tools, "documents": None}
        try:
            text = self._template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # the template is a program of the model's; it may raise anything
            raise InvalidRequest(f"the chat template refuses these messages: {error}", parameter="messages") from error
        return _cut_after(text, messages[-1]["content"]) if continue_final_message else text


def _cut_after(text: str, final: str) -> str:
    at = text.rfind(final.strip())
    if at < 0:
        raise InvalidRequest(
            "the chat template changes the final message; it cannot be continued", parameter="messages"
        )
    return text[: at + len(final.strip())]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as the model saw it in training: no HTML escapes, no ASCII escapes."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _find_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default", next(iter(named.values()), None))
    return found


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
