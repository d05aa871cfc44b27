"""Filling a model's parameters, from sharded safetensors or from a seed.

Every parameter carries the pieces it is made of (`workers.layers.parameter`), so this file knows no model: it asks a
source for exactly the rows and columns that this rank holds. Knows no other file format.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from configs.model_spec import ModelSpec
from workers.layers.parameter import Piece, ShardedParameter
from workers.quantization.kept import load_kept
from workers.quantization.kv_scales import load_kv_scales
from workers.quantization.source import DequantizingSource

RANDOM_SCALE = 0.02 * math.sqrt(3.0)
"""Random weights are uniform within ± this: the standard deviation 0.02 that transformer models start from."""

RANDOM_CHUNK = 1 << 22

UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Old checkpoints hold these; they are derived from the configuration."""


class WeightSource(Protocol):
    """Gives parts of tensors by the checkpoint's names."""

    def read(self, name: str, piece: Piece) -> Tensor:
        """The piece's rows (and columns), in any floating-point type."""
        ...


def load_weights(
    model: nn.Module, spec: ModelSpec, *, load_format: str = "auto", seed: int = 0, kv_scales: bool = False
) -> None:
    """Fill every parameter of `model`, this rank's part of the checkpoint in `spec.directory`.

    `kv_scales`: take over the scales of a KV cache in fp8, if it brings them.

    ValueError: tensors that are missing, left over, or of another shape than the configuration says.
    """
    if load_format == "random":
        fill(model, RandomSource(seed, next(model.parameters()).device))
        return
    with SafetensorsSource(spec.directory) as files:
        if spec.quantization is None:
            fill(model, files)
            files.check_all_used(tied=spec.tie_word_embeddings)
        else:
            source = DequantizingSource(files, spec.quantization)
            fill(model, source)
            load_kept(model, source)
            if kv_scales:
                load_kv_scales(model, files)
            files.check_all_used(tied=spec.tie_word_embeddings, is_idle=source.is_idle)


@torch.no_grad()
def fill(model: nn.Module, source: WeightSource) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedParameter), f"{name} does not say which slices of the checkpoint it holds"
        for piece in parameter.pieces:
            value = source.read(piece.tensor_name(name), piece)
            if piece.offset:
                value = value.to(parameter.dtype) + piece.offset
            parameter[piece.target.start : piece.target.stop].copy_(value)


class SafetensorsSource:
    """The .safetensors files of one directory, read by slices: pages outside them are never touched."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._used: set[str] = set()
        for path in checkpoint_files(directory):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged or cut short ({error}); fetch it again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str, piece: Piece) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise ValueError(f"{self._directory} holds no tensor {name}, which its config.json calls for")
        self._used.add(name)
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != piece.full_shape:
            raise ValueError(
                f"{self._directory}: {name} has shape {list(stored.get_shape())}, "
                f"its config.json calls for {list(piece.full_shape)}"
            )
        rows = slice(piece.rows.start, piece.rows.stop)
        if not piece.rows or (piece.columns is not None and not piece.columns):
            return torch.empty([len(piece.rows)] + ([] if piece.columns is None else [len(piece.columns)]))
        if piece.columns is None:
            return stored[rows]
        return stored[rows, piece.columns.start : piece.columns.stop]

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read_whole(self, name: str) -> Tensor:
        """For the few small tensors that every rank needs whole, of whatever shape they are."""
        if name not in self._files:
            raise ValueError(f"{self._directory} holds no tensor {name}, which its config.json calls for")
        self._used.add(name)
        whole: Tensor = self._files[name].get_tensor(name)
        return whole

    def check_all_used(self, *, tied: bool, is_idle: Callable[[str], bool] = lambda name: False) -> None:
        """A tensor that no parameter asked for means a feature that the model code does not have.

        `is_idle` knows those that a format holds and nobody needs.
        """
        expected = {"lm_head.weight"} if tied else set()
        left = [n for n in self._files if n not in self._used | expected and not n.endswith(UNUSED_SUFFIXES)]
        left = [name for name in left if not is_idle(name)]
        if left:
            named = ", ".join(sorted(left)[:3])
            raise ValueError(f"{self._directory} holds {len(left)} tensors that this model does not use: {named}")


def checkpoint_files(directory: Path) -> list[Path]:
    """The files of a checkpoint; the index decides where there is one. ValueError: none, or one that it names lacks."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [directory / name for name in sorted(names)]
    elif (directory / "model.safetensors").is_file():
        paths = [directory / "model.safetensors"]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{directory} holds no .safetensors file; other weight formats must be converted first")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {index.name} names it; fetch the model again")
    return paths


class RandomSource:
    """Weights that are a pure function of (seed, tensor name, row, column): any split of a model gives the same model.

    The function is integer hashing (multiply and shift, as in SplitMix64), so it has the same bits on every device.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._device = device

    def read(self, name: str, piece: Piece) -> Tensor:
        columns = range(1) if piece.columns is None else piece.columns
        shape = [len(piece.rows)] if piece.columns is None else [len(piece.rows), len(columns)]
        if piece.init != "uniform":
            return torch.full(shape, float(piece.init == "ones"), device=self._device)
        width = 1 if len(piece.full_shape) == 1 else piece.full_shape[1]
        values = torch.empty(len(piece.rows), len(columns), device=self._device)
        key = self._key(name)
        offsets = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=self._device)
        step = max(1, RANDOM_CHUNK // max(1, len(columns)))
        for start in range(0, len(piece.rows), step):
            part = values[start : start + step]
            first = piece.rows.start + start
            rows = torch.arange(first, first + len(part), dtype=torch.int64, device=self._device).mul_(width)
            part.copy_(hashed_uniform(rows.unsqueeze(1) + offsets, key)).mul_(RANDOM_SCALE)
        return values.view(shape)

    def _key(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def hashed_uniform(index: Tensor, key: int) -> Tensor:
    """int64 `index` (overwritten) -> float32, uniform in [-1, 1), one of 2 ** 24 values."""
    index.add_(key).mul_(-0x61C8864680B583EB)
    index.bitwise_xor_(index >> 31).mul_(-0x40A7B892E31B1A47)
    index.bitwise_xor_(index >> 29).mul_(-0x6B2FB644ECCEEE15)
    return (index >> 40).to(torch.float32).mul_(2.0**-23)
