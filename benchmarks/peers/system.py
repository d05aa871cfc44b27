"""One system under test: how it is started and how it wants to be asked.

Owns the shape that the adapters (`antiphon`, `vllm`, `llama_cpp`, `transformers_serve`) fill in. Starts nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

MODEL_NAME = "model"  # what each server calls it, where that can be said


def default_peers_directory() -> Path:
    return Path(os.environ.get("ANTIPHON_PEERS", "~/.cache/antiphon-peers")).expanduser()


@dataclass(frozen=True)
class Setting:
    """What every system gets alike."""

    peers: Path  # where the peers are installed; see this folder's README
    model: Path  # a Hugging Face directory with unquantized weights
    gguf: Path  # a folder with F32.gguf, Q8_0.gguf, ...
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    kv_gib: float
    port: int

    @property
    def model_without_eos(self) -> Path:
        """For servers that do not know `ignore_eos`; made by `benchmarks.peers.models`."""
        return self.peers / "models" / f"{self.model.resolve().name}-noeos"

    @cached_property
    def model_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config


@dataclass(frozen=True, slots=True)
class System:
    """A server ready to be started. What must exist is in `needed`, so that it is said early if it does not."""

    name: str
    command: list[str]
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)
    needed: tuple[Path, ...] = ()
    health: str = "/health"
    model_name: str = MODEL_NAME
    omitted: frozenset[str] = frozenset()  # body fields that it refuses
    tokenizer_file: Path | None = None  # given: prompts must be texts
    cache_variables: tuple[str, ...] = ()  # environment: each names a folder where it keeps what it compiled

    def missing(self) -> list[Path]:
        return [path for path in self.needed if not path.exists()]


Adapter = Callable[[str, Setting], System]


def unknown_variant(peer: str, variant: str, known: Mapping[str, object]) -> ValueError:
    return ValueError(f"{peer} has no variant {variant!r}; give one of {', '.join(f'{peer}-{k}' for k in known)}")
