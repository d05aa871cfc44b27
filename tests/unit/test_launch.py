from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.demo import Stream, _print_whole_lines, _take_event, _times
from cluster.deployment_errors import ModelError, StartupError, UsageError
from cluster.launch import app
from cluster.offline import Answer, _publish, opened
from cluster.phases import Phases
from cluster.preflight import listen
from cluster.preparation import Preparation
from cluster.prompts import Prompt, read_prompts
from configs.schema import ModelConfig
from workers.prepare import _cache_name

ROOT = Path(__file__).resolve().parents[2]


def deploy(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=False)


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and error output without a process, where signals and environment have not been touched yet."""
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == (environment, handler)
    return result.exit_code, result.stderr


def test_the_launcher_loads_neither_ray_nor_torch():
    code = (
        "import cluster.launch, sys; print([name for name in ('ray', 'torch', 'numpy', 'yaml') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_brings_a_deployment_up_computes_nothing():
    code = "import cluster.supervisor, sys; print([name for name in ('ray', 'torch', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_command_is_listed(tmp_path):
    result = deploy("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("serve", "generate", "chat", "demo"))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["serve", "nothere.yaml"], 2, "nothere.yaml does not exist"),
        (["serve", "tiny-random", "--set", "cache.blocksize=3"], 2, "did you mean cache.block_size?"),
        (["serve", "tiny-random", "--set", "ingress.host=192.0.2.77"], 5, "set ingress.host"),
        (["serve", "tiny-random", "--set", "cluster.address=http://head:8265"], 2, "ray job submit"),
        (["serve", "tiny-random", "--set", "cluster.address=127.0.0.1:1"], 5, "no Ray head answers"),
        (["generate", "tiny-random"], 2, "nothing to answer"),
        (["generate", "tiny-random", "-p", "x", "--top-p", "0"], 2, "top_p"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_one_line_with_an_exit_code(arguments, exit_code, message):
    code, stderr = refused(*arguments)
    assert code == exit_code
    assert is_one_error(stderr, message)


def test_a_model_that_does_not_exist_is_one_line_with_an_exit_code():
    result = deploy("serve", "tiny-random", "--set", "model.path=/nonexistent")
    assert result.returncode == 3
    assert is_one_error(result.stderr, "/nonexistent does not exist")
    assert "Traceback" not in result.stderr


def test_a_model_that_was_converted_before_is_found_without_numpy(tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    converted = tmp_path / "cache" / "models" / _cache_name(source)
    converted.mkdir(parents=True)
    code = f"""
import sys
for library in ("numpy", "torch"):
    sys.modules[library] = None
from workers.prepare import prepare_model
print(prepare_model({str(source)!r}, {str(tmp_path / "cache")!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == str(converted), result.stderr


def is_one_error(stderr: str, message: str) -> bool:
    is_last = stderr.strip().splitlines()[-1].startswith("error:")
    return message in stderr and stderr.count("error:") == 1 and is_last


def test_a_port_in_use_is_refused_before_anything_is_loaded():
    with listen("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        code, stderr = refused("serve", "tiny-random", "--set", f"ingress.port={port}")
    assert code == 5
    assert f"port {port} on 127.0.0.1 is in use" in stderr


def test_prompts_come_from_the_command_line_then_from_the_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("second\n\nthird\n")
    prompts = read_prompts(["first"], file, as_chat=False)
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "first"), (1, "second"), (2, "third")]


def test_json_lines_hold_prompts_or_conversations(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    one, two = read_prompts([], file, as_chat=False)
    assert one.text == "one"
    assert two.messages[0]["content"] == "two"
    assert two.summary == "two"


def test_a_bad_line_of_a_prompt_file_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(UsageError, match=r"prompts.jsonl:2: give an object"):
        read_prompts([], file, as_chat=False)
    file.write_text("{")
    with pytest.raises(UsageError, match=r"prompts.jsonl:1: not JSON"):
        read_prompts([], file, as_chat=False)
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts([], tmp_path / "absent", as_chat=False)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "9" * 5000, '{"prompt": "\\ud800"}', '{"messages": [{"content": "\\udfff"}]}']
)
def test_a_line_that_json_alone_would_let_through_is_named_too(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match=r"prompts.jsonl:1: not"):
        read_prompts([], file, as_chat=False)


def test_a_prompt_that_is_not_utf_8_is_refused():
    with pytest.raises(UsageError, match="--prompt: not valid Unicode"):
        read_prompts([b"a\xff".decode(errors="surrogateescape")], None, as_chat=False)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path):
    with (
        pytest.raises(UsageError, match=r"out.jsonl cannot be written: No such file"),
        opened(tmp_path / "no" / "out.jsonl"),
    ):
        pass
    with opened(tmp_path / "out.jsonl") as sink:
        assert sink is not None
    with opened(None) as sink:
        assert sink is None


def test_a_full_disk_is_said_in_a_line():
    with (
        pytest.raises(UsageError, match="the answers cannot be written: No space left on device"),
        opened(Path("/dev/full")) as sink,
    ):
        _publish(Answer(Prompt(0, text="hi"), "ho"), sink, False)


def test_a_prompt_becomes_a_conversation_where_the_template_is_wanted():
    (prompt,) = read_prompts(["hi"], None, as_chat=True)
    assert prompt.messages == ({"role": "user", "content": "hi"},)


def test_an_answer_is_written_with_its_prompt_and_an_error_instead_of_a_text():
    prompt = Prompt(3, text="hi")
    assert json.loads(Answer(prompt, "ho", 2, "stop").as_json()) == {
        "index": 3,
        "prompt": "hi",
        "text": "ho",
        "num_tokens": 2,
        "finish_reason": "stop",
    }
    assert json.loads(Answer(prompt, error="too long").as_json()) == {"index": 3, "prompt": "hi", "error": "too long"}


def test_a_phase_is_printed_with_its_time_and_notes():
    clock = iter([0.0, 1.0, 3.5])
    output = io.StringIO()
    phases = Phases(Console(file=output), clock=lambda: next(clock))
    with phases.phase("load") as phase:
        phase.note("weights")
    assert output.getvalue().split() == ["load", "2.50", "s", "weights"]


def test_a_name_with_brackets_is_shown_as_it_is():
    output = io.StringIO()
    Phases(Console(file=output)).show("serving llama[int4]")
    assert output.getvalue() == "serving llama[int4]\n"


def make_event(text: str | None = None, tokens: int | None = None) -> dict[str, object]:
    event: dict[str, object] = {"choices": [{"delta": {"content": text}}] if text is not None else []}
    return event | ({"usage": {"completion_tokens": tokens}} if tokens is not None else {})


def test_the_demo_times_the_first_token_and_the_rate_after_it():
    stream = Stream(1, "why?")
    _take_event(stream, make_event(""), 0.1)
    for text, now in (("Be", 0.5), ("cause", 1.0), (".", 1.5)):
        _take_event(stream, make_event(text), now)
    _take_event(stream, make_event(tokens=3), 1.6)
    assert stream.answer == "Because."
    assert stream.first_token_s == 0.5
    assert stream.tokens_per_s == pytest.approx(2.0)


def test_the_demo_does_not_take_an_error_event_for_an_answer():
    with pytest.raises(OSError, match="rank 1 was lost"):
        _take_event(Stream(1, "why?"), {"error": {"message": "rank 1 was lost"}}, 0.5)


def test_the_demo_prints_whole_lines_with_their_question():
    output = io.StringIO()
    console = Console(file=output, width=200)
    stream = Stream(2, "why?", answer="first\nsec")
    _print_whole_lines(console, stream)
    assert output.getvalue() == "[2] first\n"
    stream.answer += "ond " + "word " * 40
    _print_whole_lines(console, stream)
    assert output.getvalue().splitlines()[1].startswith("[2] second word")
    stream.is_done = True
    _print_whole_lines(console, stream)
    printed = " ".join(line.removeprefix("[2] ") for line in output.getvalue().splitlines())
    assert printed.split() == stream.answer.split()


def test_the_demos_table_sums_up():
    streams = [Stream(1, "why?", first_token_s=0.5, last_token_s=1.5, num_tokens=11), Stream(2, "how?", num_tokens=9)]
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(_times(streams, 2.0))
    text = console.export_text()
    assert "500 ms" in text
    assert "10.0" in text  # both: the first stream's rate, and 20 tokens in 2 s


def test_a_model_that_does_not_exist_fails_early():
    preparation = Preparation(ModelConfig(path="/nonexistent"))
    with pytest.raises(ModelError, match="/nonexistent does not exist"):
        preparation.fail_early(patience=20.0)


def test_a_preparation_that_was_killed_is_said_to_be(monkeypatch):
    slow = SimpleNamespace(executable=str(ROOT / "tests" / "support" / "never_ends.sh"))
    monkeypatch.setattr("cluster.preparation.sys", slow)
    preparation = Preparation(ModelConfig(path="model"))
    preparation.process.kill()
    with pytest.raises(ModelError, match="preparation of model was ended by SIGKILL; if that was for lack of memory"):
        preparation.wait(20.0)


def test_a_preparation_that_takes_too_long_is_ended(monkeypatch):
    slow = SimpleNamespace(executable=str(ROOT / "tests" / "support" / "never_ends.sh"))
    monkeypatch.setattr("cluster.preparation.sys", slow)
    preparation = Preparation(ModelConfig(path="model"))
    started = time.monotonic()
    with pytest.raises(StartupError, match=r"was not ready within 0\.2 s"):
        preparation.wait(0.2)
    assert time.monotonic() - started < 5
    assert preparation.process.returncode is not None
