"""A converted GGUF file holds what transformers reads from it: weights, configuration, tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from configs.matrices import num_parameters
from configs.model_spec import ModelSpec
from tests.support.tiny_gguf import TINY_GGUFS, byte_level_vocabulary, sentencepiece_vocabulary, write_tiny_gguf
from workers.gguf_file import GgufFile
from workers.prepare import prepare_model

TEXTS = [
    "",
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,   three,    four; \t tabs\tand\n\nblank\r\n lines \n",
    "1234567890 12.5% x2 3\u00b2 \u00bd \uff13\uff14 a  12",
    "Größe, naïve café, façade; \u0065\u0301 decomposed",
    "日本語のテキストと中文,한국어 문장.",
    "Русский текст, ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji \U0001f9ff",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment\n\n\n",
    "<|bos|>text<|eos|><think>no</think> <bos><eos><extra> <unk> <0x41> <|im_start|>user\nhi<|im_end|>",
    "I'm you're they've WE'LL it's 'tis don''t",
    "zero\u200bwidth nbsp\u00a0here \u3000wide \x00 null \x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "\u2581 literal marker \u2581\u2581",
]
QWEN2, LLAMA3 = byte_level_vocabulary("qwen2"), {**byte_level_vocabulary("llama-bpe"), "add_bos_token": True}
VOCABULARIES = {
    "qwen2": QWEN2,
    "qwen3": QWEN2,
    "llama": sentencepiece_vocabulary(gemma=False),
    "gemma3": sentencepiece_vocabulary(gemma=True),
}


def converted(source: Path, cache: Path) -> Path:
    return prepare_model(str(source), cache)


def transformers_model(source: Path) -> PreTrainedModel:
    """As from_pretrained(gguf_file=...) makes it, without its need for another package."""
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("name", TINY_GGUFS)
def test_weights_and_logits_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", name, VOCABULARIES[name])
    directory = converted(source, tmp_path / "cache")
    reference = transformers_model(source)
    expected = reference.state_dict()
    actual = load_file(directory / "model.safetensors")
    assert set(expected) - set(actual) <= {"lm_head.weight"}
    for tensor_name, tensor in actual.items():
        assert torch.equal(tensor.float(), expected[tensor_name]), tensor_name
    # The configuration, too: loaded from the directory alone, the model computes the same.
    token_ids = torch.arange(3, 60).unsqueeze(0)
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(token_ids).logits
        torch.testing.assert_close(again, reference(token_ids).logits, rtol=0, atol=1e-4)
    assert num_parameters(ModelSpec.from_directory(directory)) == sum(p.numel() for p in reference.parameters())


def test_unquantised_16_bit_tensors_keep_their_type(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", VOCABULARIES["llama"])
    stored = {str(tensor.dtype) for tensor in load_file(converted(source, tmp_path) / "model.safetensors").values()}
    assert stored == {"torch.float32", "torch.float16", "torch.bfloat16"}


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [
        ("qwen2", QWEN2),
        ("llama", LLAMA3),
        ("llama", byte_level_vocabulary("smollm")),
        ("llama", VOCABULARIES["llama"]),
        ("gemma3", VOCABULARIES["gemma3"]),
    ],
    ids=["qwen2", "llama3", "smollm", "sentencepiece", "gemma"],
)
def test_tokenizer_encodes_and_decodes_as_transformers_conversion_does(
    name: str, vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", name, vocabulary)
    directory = converted(source, tmp_path / "cache")
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in TEXTS:
        expected = theirs(text).input_ids
        encoding = ours.encode(text)
        assert encoding.ids == expected, (text, encoding.tokens)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    reloaded = AutoTokenizer.from_pretrained(directory)
    assert reloaded(TEXTS[1]).input_ids == theirs(TEXTS[1]).input_ids
    assert reloaded.eos_token == theirs.eos_token and reloaded.chat_template == theirs.chat_template


def test_llama3_rope_scaling_is_recovered_from_its_divisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_divisors(divisors: np.ndarray[Any, Any]) -> Path:
        path = tmp_path / f"{divisors.max():.0f}.gguf"
        write = gguf.GGUFWriter.write_header_to_file

        def add_first(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
            write(writer)

        with monkeypatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_first)
            return write_tiny_gguf(path, "llama", VOCABULARIES["llama"])

    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(0, 32, 2) / 32)
    smooth = (8192 / wavelengths - 1) / 3
    llama3 = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 8, 1 / ((1 - smooth) / 8 + smooth)))
    spec = ModelSpec.from_directory(converted(with_divisors(llama3), tmp_path / "cache"))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_max_len) == ("llama3", 8.0, 8192)
    with pytest.raises(ValueError, match="not those of Llama 3"):
        converted(with_divisors(np.linspace(1, 3, 16)), tmp_path / "cache")


def test_yarn_scaling_is_read_from_the_metadata(tmp_path: Path) -> None:
    scaling = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 128,
    }
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", QWEN2, **scaling)
    rope = ModelSpec.from_directory(converted(source, tmp_path)).rope
    assert (rope.kind, rope.factor, rope.original_max_len) == ("yarn", 4.0, 128)


def test_conversion_happens_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", VOCABULARIES["llama"])
    first = converted(source, tmp_path / "cache")
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert converted(source, tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    os.utime(source, ns=(0, 0))
    assert converted(source, tmp_path / "cache") != first


def test_several_who_want_the_same_model_at_once_get_one_conversion(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", VOCABULARIES["llama"])
    with ThreadPoolExecutor(4) as pool:
        directories = list(pool.map(converted, [source] * 4, [tmp_path / "cache"] * 4))
    assert len(set(directories)) == 1
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == [directories[0]]


def test_a_failed_conversion_leaves_no_directory(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", {**VOCABULARIES["llama"], "model": "bert"})
    with pytest.raises(ValueError, match="'bert' of this GGUF file is not supported"):
        converted(source, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"nope" + data[4:], "not a GGUF file"),
        (lambda data: data[:2000], "damaged or cut short"),
        (lambda data: data[:-5000], "cut short"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9 is not supported"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", VOCABULARIES["llama"])
    source.write_bytes(damage(source.read_bytes()))
    with pytest.raises(ValueError, match=message):
        converted(source, tmp_path / "cache")


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'mamba' is not supported"):
        converted(tmp_path / "x.gguf", tmp_path / "cache")


@pytest.mark.parametrize("ref", ["./nowhere", "/no/such/model.gguf", "missing.gguf", "a/b/c"])
def test_missing_models_are_refused_without_asking_the_hub(ref: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist: give a .*\.gguf file"):
        prepare_model(ref, tmp_path)


def test_the_command_prints_the_directory_or_one_line_of_error(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", VOCABULARIES["llama"])
    command = [sys.executable, "-m", "workers.prepare", "--cache-dir", str(tmp_path / "cache")]
    good = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=60, check=True)
    assert (Path(good.stdout.strip()) / "config.json").is_file()
    bad = subprocess.run([*command, str(tmp_path / "no.gguf")], capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 1 and bad.stderr.count("\n") == 1 and "does not exist" in bad.stderr
    command[-1] = "/dev/null"  # no folder can be made in it
    full = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=60, check=False)
    assert full.returncode == 1 and full.stderr.count("\n") == 1 and "set model.cache_dir" in full.stderr


@pytest.fixture(scope="module")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct, where `make model` has put it or $ANTIPHON_DEMO_GGUF names it."""
    in_checkout = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct.gguf"
    path = Path(os.environ.get("ANTIPHON_DEMO_GGUF", in_checkout))
    if not path.is_file():
        pytest.skip("the demo model is not here: run `make model`")
    return path


def test_demo_model_has_the_very_same_tokenizer_and_the_weights_of_the_file(demo_gguf: Path, tmp_path: Path) -> None:
    directory = converted(demo_gguf, tmp_path)
    theirs = AutoTokenizer.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert json.loads(ours.to_str()) == json.loads(theirs.backend_tokenizer.to_str())

    spec = ModelSpec.from_directory(directory)
    assert (spec.num_heads, spec.num_kv_heads, spec.rope.theta, spec.rms_norm_eps) == (9, 3, 1e5, 1e-5)
    weights = load_file(directory / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == num_parameters(spec) == 134_515_008
    with GgufFile(demo_gguf) as file:
        q, down = (file.tensors[f"blk.29.{name}.weight"] for name in ("attn_q", "ffn_down"))
        permuted = torch.from_numpy(file.rows(q, np.arange(576)))
        unpermuted = permuted.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
        assert torch.equal(weights["model.layers.29.self_attn.q_proj.weight"], unpermuted)
        plain = torch.from_numpy(file.rows(down, np.arange(576)))
        assert torch.equal(weights["model.layers.29.mlp.down_proj.weight"], plain)
