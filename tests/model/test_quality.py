"""What a format costs in quality: the figures by hand, the file that llama.cpp reads, and the whole script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import quality
from benchmarks.peers.llama_perplexity import BaseWriter, read_figures
from benchmarks.quality_figures import Agreement, Expected, Figures, Mean, Scored
from benchmarks.quality_report import complaints
from benchmarks.quality_text import Text, cut, language_reference
from cluster.text.tokenizer import Tokenizer
from tests.support.cpu_kernels import variants_here

CONTEXT = 64
SMALL = ["--tokens", "120", "--context", str(CONTEXT), "--prompts", "3", "--new-tokens", "4", "--num-threads", "1"]

# What the figures are read from; the rest of the output is left out.
LLAMA_OUTPUT = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  20.808000 ±   2.615000
Mean PPL(base)                :  20.652000 ±   2.603000
Cor(ln(PPL(Q)), ln(PPL(base))):  99.95%
Mean ln(PPL(Q)/PPL(base))     :  -0.001200 ±   0.000040

====== KL divergence statistics ======
Mean    KLD:   0.000001 ±   0.000000
Maximum KLD:   0.042400
Minimum KLD:  -0.000004

====== Token probability statistics ======
RMS Δp    :  1.500 ± 0.040 %
Same top p: 99.700 ± 0.732 %
"""


@pytest.fixture(autouse=True)
def _threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def figures(**changes: object) -> Figures:
    equal = {"perplexity": Mean(10.0, 0.1), "log_ratio": Mean(0.0), "divergence": Mean(0.0), "most_divergence": 0.0}
    return Figures(**equal | {"same_top": 1.0, "mean_logit_gap": 0.0, "most_logit_gap": 0.0} | changes)  # type: ignore[arg-type]


def test_the_figures_are_those_of_the_definitions() -> None:
    reference = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])  # probabilities 1/4, 3/4 and 4/5, 1/5
    other = torch.tensor([[0.0, 0.0], [math.log(4.0), 0.0]])  # 1/2, 1/2 and the same
    scored = Scored()
    for row in range(2):
        scored.add(other[row : row + 1], Expected(reference[row : row + 1], torch.tensor([1 - row])))
    found = scored.figures()
    assert found.perplexity.value == pytest.approx((1 / 2 * 4 / 5) ** -0.5)
    assert found.log_ratio.value == pytest.approx((math.log(3 / 4) - math.log(1 / 2)) / 2)
    divergence = 1 / 4 * math.log(1 / 2) + 3 / 4 * math.log(3 / 2)
    assert found.divergence.value == pytest.approx(divergence / 2)
    assert found.divergence.error == pytest.approx(divergence / 2)  # of 0 and d: spread d / sqrt 2, over sqrt 2
    assert found.most_divergence == pytest.approx(divergence)
    assert found.same_top == 0.5  # the first argmax of equal logits is 0
    assert found.mean_logit_gap == pytest.approx(math.log(3.0) / 4)
    assert found.most_logit_gap == pytest.approx(math.log(3.0))


def test_a_mean_that_rounds_to_nothing_has_no_sign() -> None:
    assert Mean(-4e-6, 2e-6).text(5) == "0.00000 ± 0.00000"
    assert Mean(-6e-6).text(5) == "-0.00001 ± 0.00000"


def test_agreement_counts_tokens_until_the_first_that_differs() -> None:
    reference = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]]
    answers = [[1, 2, 3, 4], [5, 9, 7, 8], [1, 1, 1, 2]]
    forced = [[1, 2, 3, 4], [5, 9, 7, 8], [1, 1, 1, 1]]
    found = Agreement.of(answers, reference, forced)
    assert (found.num_prompts, found.num_equal, found.median_parted) == (3, 1, 2.0)
    assert found.equal_share == pytest.approx((4 + 1 + 3) / 12)
    assert found.forced_share == pytest.approx(11 / 12)


def test_llama_cpp_reads_our_tokens_and_log_probabilities(tmp_path: Path) -> None:
    """Read here as its source does: three numbers, all tokens, and a step, a lowest value and counts for each row."""
    chunks, vocab_size = [[1, 2, 3, 4], [5, 6, 7, 8]], 5
    logits = [3 * torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    logits[1][0, 2] = -100.0  # beyond what the file can say
    writer = BaseWriter(tmp_path / "base", chunks, vocab_size)
    for rows in logits:
        writer.add(rows)
    writer.close()
    data = (tmp_path / "base").read_bytes()
    assert data[:8] == b"_logits_"
    assert np.frombuffer(data, np.int32, 3, 8).tolist() == [4, vocab_size, 2]
    assert np.frombuffer(data, np.int32, 8, 20).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    stored = np.frombuffer(data, np.uint16, -1, 20 + 8 * 4).reshape(2, 4 + vocab_size + 1)
    step, lowest = stored[:, :4].copy().view(np.float32).T
    read = step[:, None] * stored[:, 4 : 4 + vocab_size] + lowest[:, None]
    expected = torch.log_softmax(torch.cat(logits), dim=-1)
    floor = expected.amax(dim=-1, keepdim=True) - 16
    np.testing.assert_allclose(read, torch.maximum(expected, floor).numpy(), atol=2e-4)


def test_llama_cpp_is_read_by_the_names_of_its_figures() -> None:
    found = read_figures(LLAMA_OUTPUT)
    assert found.perplexity == Mean(20.808, 2.615)
    assert found.log_ratio == Mean(-0.0012, 0.00004)
    assert (found.divergence, found.most_divergence) == (Mean(1e-6, 0.0), 0.0424)
    assert found.same_top == pytest.approx(0.997)
    with pytest.raises(ValueError, match="no 'Mean ln"):
        read_figures("Mean PPL(Q) : 20.8 ± 2.6\n")


def test_what_is_beyond_a_bound_is_said_by_name() -> None:
    assert complaints({"fp32": figures(), "int8": figures(log_ratio=Mean(0.03, 0.013)), "other": figures()}) == []
    (told,) = complaints({"int8": figures(log_ratio=Mean(0.03, 0.005)), "llama.cpp Q8_0": figures(same_top=0.1)})
    assert told == "int8: log of the ratio of perplexities 0.03000 ± 0.00500, at most 0.005"
    assert len(complaints({"bf16": figures(divergence=Mean(1.0), same_top=0.5, mean_logit_gap=9.0)})) == 3


def test_a_text_is_cut_into_whole_chunks_and_a_short_one_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer(tiny_checkpoint("smollm2"))
    text = Text("a" * 200, "letters")
    assert [len(chunk) for chunk in cut(text, tokenizer, 64, 32)] == [64, 64]  # 31 scored in each
    with pytest.raises(ValueError, match="200 tokens, of which 93 can be scored in chunks of 64"):
        cut(text, tokenizer, 64, 94)


def test_the_text_is_prose_and_says_where_it_is_from() -> None:
    text = language_reference()
    assert len(text.content) > 100_000
    assert "  " not in text.content
    assert "pydoc_data/topics.py of Python 3." in text.description


def tiny(directory: Path, *more: str) -> list[str]:
    return ["--model", str(directory), *SMALL, *more]


needs_kernels = pytest.mark.skipif(not variants_here(), reason="no compiler for the kernels")


@needs_kernels
def test_the_script_compares_every_way_of_a_tiny_model(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    quality.main(tiny(tiny_checkpoint("smollm2"), "--out", str(tmp_path / "report.md")))
    rows = table_rows((tmp_path / "report.md").read_text())
    for name in ("fp32", "bf16", "int8", "int8-kv-int8", "int4"):
        assert len(rows[name]) == 2  # in both tables
    assert rows["fp32"][0][1:3] == [rows["pytorch-fp32"][0][1], "0.00000 ± 0.00000"]
    assert rows["fp32"][1] == ["fp32", "3 of 3", "", "100.00%", "100.00%"]
    divergences = [float(rows[name][0][3].split()[0]) for name in ("fp32", "bf16", "int8", "int4")]
    assert divergences == sorted(divergences)
    assert 0 < divergences[1] < divergences[2] < 0.1


def table_rows(report: str) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for line in report.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(cells[0], []).append(cells)
    return found


def fake_llama(folder: Path, script: str) -> list[str]:
    program = folder / "llama.cpp" / "bin" / "llama-perplexity"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (folder / "gguf").mkdir()
    (folder / "gguf" / "F32.gguf").touch()
    return ["--peers", str(folder), "--llama", "f32", "--ways", "pytorch-fp32", "--prompts", "0"]


def test_llama_cpp_gets_the_reference_and_is_held_to_be_equal(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "said"
    arguments = fake_llama(
        tmp_path, f'for word; do [ -f "$word" ] && head -c 8 "$word"; done > {said}\ncat <<E\n{LLAMA_OUTPUT}\nE'
    )
    assert quality.main(tiny(tiny_checkpoint("smollm2"), *arguments)) == 1
    assert b"_logits_" in said.read_bytes()
    report = capsys.readouterr().out
    assert table_rows(report)["llama.cpp F32"][0][1] == "20.808 ± 2.615"
    assert "llama.cpp F32: log of the ratio of perplexities -0.00120 ± 0.00004, at most 0.0001" in report


def test_a_llama_cpp_that_fails_is_reported_with_its_last_words(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = fake_llama(tmp_path, "echo no such format >&2; exit 3")
    with pytest.raises(SystemExit, match="ended with 3:\nno such format"):
        quality.main(tiny(tiny_checkpoint("smollm2"), *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "fp8"], "--ways has 'fp8'; give some of pytorch-fp32, fp32"),
        (["--ways", ""], "--ways is empty"),
        (["--context", "3"], "--context must be 4 or more"),
        (["--prompts", "99"], "--prompts is 99; give a number from 0 to 20"),
        (["--llama", "q3"], "'q3'; give some of f32, q8_0, q4_1"),
        (["--llama", "f32", "--peers", "/nowhere"], "/nowhere/llama.cpp/bin/llama-perplexity, which is not there"),
        (["--text", "/nowhere/text"], "No such file"),
        (["--context", "4096"], "4096 tokens are more than the model's 512"),
    ],
)
def test_what_cannot_be_done_is_said_at_the_door(
    tiny_checkpoint: Callable[[str], Path], arguments: Sequence[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        quality.main(tiny(tiny_checkpoint("smollm2"), *arguments))
