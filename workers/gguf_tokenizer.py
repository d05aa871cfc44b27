"""A tokenizer.json from a GGUF file's vocabulary.

Written as JSON directly, which takes a fraction of a second; encodes as transformers' own GGUF conversion does
(compared in the tests). Two families: byte-level BPE ("gpt2") and SentencePiece-style BPE ("llama", Gemma's variant).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\u2581"  # how SentencePiece spells a space

Merges = list[tuple[str, str]]

# The regular expressions by which each family of checkpoints cuts text into words before merging.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_WORDS),
    "tekken": TEKKEN_WORDS,
}
GPT2_WORDS = ("default", "gpt-2", "smollm", "")
"""Cut by GPT-2's own expression, which the byte-level pre-tokenizer brings along."""


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """ValueError: a tokenizer of another family, by name."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        parts = _byte_level(metadata)
    elif model == "llama":
        gemma = str(metadata["general.architecture"]).startswith("gemma")
        parts = _gemma(metadata) if gemma else _sentencepiece(metadata)
    else:
        raise ValueError(f"the tokenizer {model!r} of this GGUF file is not supported; supported: gpt2, llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, parts["model"]["vocab"]),
        "post_processor": _post_processor(metadata),
        **parts,
    }


def tokenizer_config(metadata: Mapping[str, Any], max_len: int) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
    }
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Old files do not say; SentencePiece vocabularies then add it."""
    default = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    spelling = byte_spelling()
    alphabet = set(spelling)
    vocab = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(metadata["tokenizer.ggml.tokens"])
    }
    bytes_of: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre = metadata.get("tokenizer.ggml.pre", "")
    if pre in WORDS:
        split = {"type": "Split", "pattern": {"Regex": WORDS[pre]}, "behavior": "Isolated", "invert": False}
        pre_tokenizer: dict[str, Any] = {"type": "Sequence", "pretokenizers": [split, {**bytes_of, "use_regex": False}]}
    elif pre in GPT2_WORDS:
        pre_tokenizer = {**bytes_of, "use_regex": True}
    else:
        known = ", ".join(sorted([*WORDS, *filter(None, GPT2_WORDS)]))
        raise ValueError(f"the pre-tokenizer {pre!r} of this GGUF file is not supported; supported: {known}")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""),
    }


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    pre_tokenizer = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": _sentencepiece_decoder(strip),
        "model": _bpe(vocab, _merges(metadata, vocab, None), fuse_unk=True, byte_fallback=True),
    }


def _gemma(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of spaces are spelled with real spaces in the file, and the order of tokens ranks the merges."""
    tokens = [SPACE * len(t) if " " in t and not t.strip() else t for t in metadata["tokenizer.ggml.tokens"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranks = {token: -float(index) for token, index in vocab.items()}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": _sentencepiece_decoder(),
        "model": _bpe(
            vocab,
            _merges(metadata, vocab, ranks),
            unk_token="<unk>" if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(vocab: dict[str, int], merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **defaults, **options, "vocab": vocab, "merges": merges}


def _sentencepiece_decoder(*last: dict[str, Any]) -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]}


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], ranks: Mapping[str, float] | None) -> Merges:
    """The file's merges, or those its vocabulary implies: every way to put a token together from two others.

    The best-ranked token comes first (a SentencePiece score, unless `ranks` are given), then longer left halves.
    """
    if "tokenizer.ggml.merges" in metadata:
        return [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    if ranks is None:
        ranks = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    found: list[tuple[float, int, int, str, str]] = []
    for token, rank in ranks.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        halves.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((rank, len(left), len(right), left, right) for left, right in halves)
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _added_tokens(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tokens that are matched whole in the text: control tokens, the named special ones, and user-defined ones."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    named = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    # In a byte-level vocabulary a control token outside the byte alphabet is a mislabelled ordinary one.
    alphabet = set(byte_spelling()) if metadata["tokenizer.ggml.model"] == "gpt2" else None
    added = []
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        special = index in named or (kind == CONTROL and (alphabet is None or alphabet.issuperset(token)))
        if not special and (kind != USER_DEFINED or vocab.get(token) != index):
            continue
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": index, "content": token, **flags, "special": special})
    return added


def _post_processor(metadata: Mapping[str, Any]) -> dict[str, Any]:
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special: dict[str, Any] = {}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if adds_bos(metadata) and bos is not None:
        token = metadata["tokenizer.ggml.tokens"][bos]
        special = {token: {"id": token, "ids": [bos], "tokens": [token]}}
        single = [{"SpecialToken": {"id": token, "type_id": 0}}, *single]
        pair = [*single, {"SpecialToken": {"id": token, "type_id": 1}}, pair[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def byte_spelling() -> list[str]:
    """The printable character that GPT-2's vocabulary writes for each byte: itself, or the next one from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelling, replacement = [], 0x100
    for byte in range(256):
        spelling.append(chr(byte if byte in printable else replacement))
        replacement += byte not in printable
    return spelling
