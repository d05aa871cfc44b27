"""The other commands, each from its start to its end: generate, chat, demo."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from tests.support.served import MARK, ROOT, processes_marked


def run(model: Path, command: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs to the end, which must be a good one that leaves nothing."""
    mark = secrets.token_hex(8)
    words = [
        sys.executable,
        str(ROOT / "deploy.py"),
        command,
        "tiny-random",
        "--set",
        f"model.path={model}",
        *arguments,
    ]
    result = subprocess.run(
        words, input=stdin, env=os.environ | {MARK: mark}, capture_output=True, text=True, timeout=90, check=False
    )
    assert result.returncode == 0, result.stderr
    assert processes_marked(mark) == {}
    return result


def test_generate_answers_a_file_of_prompts_into_a_file_of_answers(tiny_model: Path, tmp_path: Path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": f"prompt {number}"} for number in range(5)]
    lines.append({"messages": [{"role": "user", "content": "hi"}]})
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    result = run(
        tiny_model, "generate", "--file", str(prompts), "--output", str(answers), "--max-tokens", "8", "-p", "prompt 3"
    )
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    by_index = {answer["index"]: answer for answer in written}
    assert sorted(by_index) == list(range(7))
    assert all(0 < answer["num_tokens"] <= 8 for answer in written)
    assert by_index[0]["text"] == by_index[4]["text"]  # the prompt of the command line, and the same in the file
    assert "7/7" in result.stderr


def test_chat_answers_each_line_until_an_empty_one(tiny_model: Path):
    result = run(tiny_model, "chat", "--max-tokens", "6", stdin="hello\nand again\n\n")
    assert result.stdout.count("model>") == 2


def test_the_demo_shows_answers_and_their_times(tiny_model: Path):
    result = run(tiny_model, "demo", "--max-tokens", "12")
    assert "4 answers at once" in result.stdout
    assert "time to first token" in result.stdout
    for number in range(1, 5):
        assert f"[{number}] " in result.stdout
