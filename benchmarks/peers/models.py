"""The model in the forms that the peers need, made from what this project runs.

    python -m benchmarks.peers.models --model MODEL_DIR [--gguf FILE.gguf] [--peers DIR]

Makes PEERS/models/NAME-noeos, the same files by symbolic links with an end of sequence that greedy decoding of random
prompts does not reach, for servers that cannot ignore it; PEERS/models/NAME-bf16, its weights rounded to bfloat16, as
the hub publishes nearly all models; and, from a GGUF file, PEERS/gguf/F32.gguf and Q8_0.gguf with llama.cpp's own
`llama-quantize`, and a link to the file itself under the name of its format. What exists is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFReader, LlamaFileType
from safetensors.torch import load_file, save_file

from benchmarks.peers.system import default_peers_directory

FORMATS = ("F32", "Q8_0")
WITH_EOS = ("config.json", "generation_config.json")
TIMEOUT_S = 3600.0


def make_without_eos(model: Path, target: Path) -> None:
    """The last id of the vocabulary ends a sequence instead of the model's own."""
    target.mkdir(parents=True, exist_ok=True)
    last = json.loads((model / "config.json").read_text())["vocab_size"] - 1
    for file in model.iterdir():
        copy = target / file.name
        if copy.exists():
            continue
        if file.name in WITH_EOS:
            copy.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": last}, indent=2) + "\n")
        else:
            copy.symlink_to(file.resolve())


def make_bfloat16(model: Path, target: Path) -> None:
    """Every weight rounded to the nearest bfloat16 number and kept in 16 bits; what else there is by symbolic links."""
    target.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        copy = target / file.name
        if copy.exists():
            continue
        if file.name == "config.json":
            config = json.loads(file.read_text())
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            copy.write_text(json.dumps(config | {key: "bfloat16"}, indent=2) + "\n")
        elif file.suffix == ".safetensors":
            rounded = {name: round_to_bfloat16(tensor) for name, tensor in load_file(file).items()}
            partial = copy.with_suffix(".partial")
            save_file(rounded, partial, metadata={"format": "pt"})
            partial.rename(copy)
        else:
            copy.symlink_to(file.resolve())


def round_to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def file_type(gguf: Path) -> str:
    """`Q4_1` of a file whose weights are mostly that."""
    field = GGUFReader(gguf).get_field("general.file_type")
    if field is None:
        raise SystemExit(f"{gguf} does not say its file type; link it to PEERS/gguf/NAME.gguf by hand")
    name: str = LlamaFileType(int(field.contents())).name
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def make_ggufs(source: Path, peers: Path) -> None:
    folder = peers / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{file_type(source)}.gguf"
    if not own.exists():
        own.symlink_to(source.resolve())
    quantize = peers / "llama.cpp" / "bin" / "llama-quantize"
    for name in FORMATS:
        target = folder / f"{name}.gguf"
        if target.exists():
            continue
        partial = target.with_suffix(".partial")
        command = [str(quantize), "--allow-requantize", str(source), str(partial), name]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        partial.rename(target)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--gguf", type=Path, help="the same model as a GGUF file")
    parser.add_argument("--peers", type=Path, default=default_peers_directory())
    options = parser.parse_args(arguments)
    for suffix, make in {"noeos": make_without_eos, "bf16": make_bfloat16}.items():
        target = options.peers / "models" / f"{options.model.resolve().name}-{suffix}"
        make(options.model, target)
        print(target)
    if options.gguf is not None:
        make_ggufs(options.gguf, options.peers)
        print(*sorted((options.peers / "gguf").glob("*.gguf")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
