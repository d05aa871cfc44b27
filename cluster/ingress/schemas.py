"""The request bodies of the OpenAI API with our extension fields, and what they mean to the sampler.

Owns names, types and defaults of body fields; an unknown field is refused with the nearest name. Knows nothing of
HTTP. Ranges are `SamplingParams`' matter.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar, cast

import msgspec

from cluster.errors import InvalidRequest
from cluster.generation import GenerationOptions
from scheduler.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 1024
MAX_NAME = 64  # characters of a field's name that are looked at
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_UNSUPPORTED = "is not supported; leave it out"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints share. None is as good as leaving a field out."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Ours, and other servers'.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # OpenAI's book-keeping, without meaning here.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> GenerationOptions:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS or not all(stop):
            raise InvalidRequest(f"give at most {MAX_STOP_STRINGS} stop strings, none of them empty", parameter="stop")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", parameter="stream_options")
        return GenerationOptions(
            stop=tuple(stop),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            priority=self.priority or 0,
            tenant=self.user or "",
            cache_salt=self.cache_salt or "",
        )

    def _sampling(self, **more: Any) -> SamplingParams:
        names = (
            "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty",
            "min_tokens", "ignore_eos",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0) if self.top_k == -1 else self.top_k
        if self.seed is not None:
            given["seed"] = self.seed & MAX_SEED
        logit_bias = {_token_id(key): bias for key, bias in (self.logit_bias or {}).items()}
        try:
            return SamplingParams(
                **given,
                logit_bias=logit_bias,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                **more,
            )
        except ValueError as error:
            name = re.match(r"\w+", str(error))
            raise InvalidRequest(str(error), parameter=name[0] if name else None) from error


class CompletionBody(_Body, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, all texts or all token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS and not isinstance(self.prompt[0], int):
            raise InvalidRequest(
                f"{len(self.prompt)} prompts in one request; give at most {MAX_PROMPTS}", parameter="prompt"
            )
        kinds = {type(entry) for entry in self.prompt}
        if kinds == {int}:
            return [cast(list[int], self.prompt)]
        if kinds in ({str}, {list}):
            return cast(list[str] | list[list[int]], self.prompt)
        given = "an empty list" if not kinds else "a mixed list"
        raise InvalidRequest(
            f"prompt is {given}; give a text, a list of texts, token ids, or a list of lists of token ids",
            parameter="prompt",
        )

    @property
    def only_scores_prompt(self) -> bool:
        """`max_tokens` 0 with `echo`: nothing is to be generated."""
        return self.max_tokens == 0 and bool(self.echo) and not self.stream

    def sampling(self) -> SamplingParams:
        if self.suffix:
            raise InvalidRequest(f"suffix {_UNSUPPORTED}", parameter="suffix")
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of must equal n; every text is returned", parameter="best_of")
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(
            max_tokens=1 if self.only_scores_prompt else limit,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class ChatBody(_Body, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages with their text parts joined."""
        if not self.messages:
            raise InvalidRequest("messages is empty; give at least one message", parameter="messages")
        return [_message(message, number) for number, message in enumerate(self.messages)]

    def template_arguments(self) -> dict[str, Any]:
        continues = bool(self.continue_final_message)
        if continues and self.messages and self.messages[-1].get("role") != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant", parameter="continue_final_message"
            )
        more = self.chat_template_kwargs or {}
        if "messages" in more:
            raise InvalidRequest(
                "chat_template_kwargs cannot hold `messages`; they are a parameter of their own",
                parameter="chat_template_kwargs",
            )
        return {
            **more,
            "add_generation_prompt": self.add_generation_prompt is not False and not continues,
            "continue_final_message": continues,
        }

    def sampling(self) -> SamplingParams:
        self._refuse_unsupported()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", parameter="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}; give a value from 0 to {MAX_LOGPROBS}", parameter="top_logprobs"
            )
        return self._sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def _refuse_unsupported(self) -> None:
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest(f"tools {_UNSUPPORTED}", parameter="tools")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise InvalidRequest('response_format: only {"type": "text"} is supported', parameter="response_format")
        if self.modalities not in (None, ["text"]):
            raise InvalidRequest("modalities: only text is supported", parameter="modalities")


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def parse_body(data: bytes, kind: type[_AnyBody]) -> _AnyBody:
    """Raises: InvalidRequest, saying which field is wrong and how."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _explain(message: str, kind: type[_Body]) -> InvalidRequest:
    """msgspec's message with our remedy and the name of the parameter."""
    if "unknown field" in message:
        name = message.split("`")[1]
        near = difflib.get_close_matches(name[:MAX_NAME], kind.__struct_fields__, n=1)  # megabytes take it seconds
        remedy = f"did you mean {near[0]}?" if near else "leave it out"
        return InvalidRequest(f"unknown parameter {name}; {remedy}", parameter=name)
    path = re.search(r"`\$\.(\w+)", message)
    text = message.replace("Object missing required field", "missing parameter").replace("$.", "")
    return InvalidRequest(text, parameter=path[1] if path else None)


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise InvalidRequest(f"logit_bias[{key[:40]!r}] must name a token id", parameter="logit_bias")
    return int(key)


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} has no role", parameter=where)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{where}: content must be a text or a list of parts", parameter=where)
    return {**message, "content": content or ""}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise InvalidRequest(f"{where}: content part {kind!r} {_UNSUPPORTED}; only text parts are", parameter=where)
