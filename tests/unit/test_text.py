"""Text in and out: the tokenizer's bytes, streams that never show half a character, stop strings, chat templates."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from cluster.errors import InvalidRequest
from cluster.text.chat_template import ChatTemplate
from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.output import OutputText
from cluster.text.processor import TextProcessor
from cluster.text.stop_strings import StopStrings
from cluster.text.tokenizer import Tokenizer
from tests.support.tiny_text import CHAT_TEMPLATE, EOS, write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Like Llama 2's: words with a space sign, bytes for what has no token, one leading space stripped."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "a", "b", "\u2581a"]
    vocab = {word: number for number, word in enumerate(words)}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    directory = tmp_path_factory.mktemp("fallback")
    fast.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def test_a_first_text_finds_everything_computed(tmp_path: Path) -> None:
    text = TextProcessor.from_directory(write_tiny_tokenizer(tmp_path))
    assert "longest_token" not in vars(text.tokenizer)
    text.warm_up()
    assert vars(text.tokenizer)["longest_token"] >= 1


def stream(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 263), max_size=60))
@settings(max_examples=200, deadline=None)
def test_streamed_text_joins_to_the_full_decode_of_any_tokens(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    parts = stream(IncrementalDetokenizer(tokenizer), tokenizer.encode(text))
    assert "".join(parts) == text
    assert text.count("\ufffd") == sum(part.count("\ufffd") for part in parts)


def test_an_emoji_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert stream(IncrementalDetokenizer(tokenizer), list("🎵".encode())) == ["", "", "", "🎵", ""]


def test_a_character_that_is_never_completed_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    assert stream(IncrementalDetokenizer(tokenizer), [0xF0, 0x9F]) == ["", "", "\ufffd"]


def test_special_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = [104, tokenizer.token_id(EOS), 105]
    assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids)) == "hi"
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, token_ids)) == "h<eos>i"


@given(st.lists(st.one_of(st.text(max_size=3), st.sampled_from([" the", " a", "b", "é", "漢字"])), max_size=12))
@settings(max_examples=100, deadline=None)
def test_a_byte_fallback_vocabulary_streams_to_the_full_decode(fallback_tokenizer: Tokenizer, parts: list[str]) -> None:
    token_ids = fallback_tokenizer.encode("".join(parts))
    whole = IncrementalDetokenizer(fallback_tokenizer, at_start=True)
    assert "".join(stream(whole, token_ids)) == fallback_tokenizer.decode(token_ids)


def test_a_continuation_keeps_the_space_before_its_first_word(fallback_tokenizer: Tokenizer) -> None:
    token_ids = [fallback_tokenizer.token_id("\u2581the")]
    assert "".join(stream(IncrementalDetokenizer(fallback_tokenizer), token_ids)) == " the"
    assert fallback_tokenizer.decode(token_ids) == "the"


def test_half_of_a_surrogate_pair_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    text, ticks, done = "hello world " * 40_000, [], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    tokenizer.encode(text)
    done.set()
    thread.join()
    assert len(ticks) > 10


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\ud7ff"])
def test_a_broken_tokenizer_is_refused_by_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer: .*; fetch the file again"):
        Tokenizer(tmp_path)


def test_a_decoder_that_does_not_work_token_by_token_is_refused_by_name(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="decoder WordPiece is not supported"):
        Tokenizer(tmp_path)


# -- stop strings ------------------------------------------------------------------------------------------------


def run(stop: StopStrings, parts: list[str]) -> str:
    return "".join([*(stop.push(part) for part in parts), "" if stop.found else stop.flush()])


def first_match(text: str, strings: list[str]) -> tuple[int, int, str] | None:
    """The slow way: read character by character until the text ends with a stop string."""
    for end in range(len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


letters = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=5), max_size=8), st.lists(letters, min_size=1, max_size=3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_where_a_reader_of_characters_would(parts: list[str], strings: list[str], keep: bool) -> None:
    stop = StopStrings(strings, include_in_output=keep)
    text, match = "".join(parts), first_match("".join(parts), strings)
    shown = run(stop, parts)
    if match is None:
        assert (shown, stop.found) == (text, None)
    else:
        start, end, string = match
        assert (shown, stop.found) == (text[: end if keep else start], string)


def test_text_that_may_begin_a_stop_string_waits_and_the_rest_does_not() -> None:
    stop = StopStrings(["\n\nUser:"])
    assert [stop.push("Hello\n"), stop.push("\nU"), stop.push("nder")] == ["Hello", "", "\n\nUnder"]


def test_a_stop_string_as_long_as_a_book_costs_no_more_than_its_own_length() -> None:
    stop = StopStrings(["a" * 500_000 + "b"])
    assert [stop.push("xaaa"), stop.push("aaac"), stop.flush()] == ["x", "aaaaaac", ""]


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings([]).push("anything") == "anything"


def test_a_stop_string_counts_only_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, stop=["x"], min_tokens=3)
    assert [text.push(ord(char)) for char in "xaax"] == ["x", "a", "a", ""]
    assert (text.finish_reason, text.stop_reason) == ("stop", "x")


def test_a_stop_token_is_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    for include, shown in ((False, ""), (True, "!")):
        text = OutputText(tokenizer, stop_token_ids=frozenset({33}), include_stop_str_in_output=include)
        assert text.push(33, "stop") == shown
        assert (text.finish_reason, text.stop_reason) == ("stop", 33)


def test_held_back_text_is_shown_when_the_length_ends_it(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, stop=["abc"])
    assert [text.push(97), text.push(98, "length")] == ["", "ab"]
    assert (text.finish_reason, text.stop_reason) == ("length", None)


# -- chat templates ----------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def test_a_template_is_rendered_with_the_prompt_for_the_answer() -> None:
    assert template(CHAT_TEMPLATE).render(MESSAGES) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert template(CHAT_TEMPLATE).render(MESSAGES, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_the_final_message_can_be_continued() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure, "}]
    assert template(CHAT_TEMPLATE).render(messages, continue_final_message=True).endswith("assistant\nSure,")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", ""),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_the_usual_names_work_in_a_template(source: str, text: str) -> None:
    assert template(source).render(MESSAGES, enable_thinking=False) == text


@pytest.mark.parametrize("source", ["{{ 1 // 0 }}", "{{ range(10**9) }}", "{{ messages[5] + 1 }}", "{{ undefined.x }}"])
def test_whatever_a_template_does_wrong_is_the_client_s_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        template(source).render(MESSAGES)


def test_a_template_s_own_refusal_is_the_client_s_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        template(source).render(MESSAGES)


def test_a_model_without_template_cannot_chat() -> None:
    with pytest.raises(InvalidRequest, match="use /v1/completions"):
        ChatTemplate(None, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": json.dumps({"chat_template": "from config"})},
        {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": "from config"}]})},
        {"chat_template.jinja": "from config", "tokenizer_config.json": json.dumps({"chat_template": "older"})},
        {"chat_template.json": json.dumps({"chat_template": "from config"})},
    ],
)
def test_the_template_is_found_in_every_place_that_models_keep_it(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert ChatTemplate.from_directory(tmp_path).render(MESSAGES) == "from config"


def test_a_broken_template_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="not valid Jinja"):
        ChatTemplate.from_directory(tmp_path)
