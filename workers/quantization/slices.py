"""A rank's part of a quantised matrix, before it is decided how to compute with it.

Both kinds can be dequantised by plain PyTorch, which defines what they mean. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.layers.parameter import Piece

NIBBLES = 8
"""4-bit numbers in one int32."""


class TensorFiles(Protocol):
    """The tensors of a checkpoint, read by slices."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, piece: Piece) -> Tensor: ...

    def read_whole(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """`rows` (output features) and `columns` (input features) of the matrix of `module`, which is `shape` in whole."""

    module: str
    shape: tuple[int, int]
    rows: range
    columns: range


@dataclass(frozen=True, slots=True)
class Fp8Slice:
    """[R, C] weights are value * scale, with the scale of the row and the column's group."""

    values: Tensor  # float8_e4m3fn [R, C]
    scales: Tensor  # float32 [R, G]
    groups: Tensor  # int64 [C]: the group of each column

    def dequantize(self) -> Tensor:
        """float32 [R, C], exact."""
        return _by_group(self.values.float(), self.groups, torch.mul, self.scales)


@dataclass(frozen=True, slots=True)
class Int4Slice:
    """[R, C] weights are (value - zero) * scale, with the scale and zero of the row and the column's group."""

    values: Tensor  # uint8 [R, C], 0 to 15, contiguous
    scales: Tensor  # float32 [R, G]
    zeros: Tensor  # float32 [R, G]
    groups: Tensor  # int64 [C]: the group of each column

    def dequantize(self) -> Tensor:
        """float32 [R, C], exact for the 16-bit scales that checkpoints hold."""
        weights = _by_group(self.values.float(), self.groups, torch.sub, self.zeros)
        return _by_group(weights, self.groups, torch.mul, self.scales)


def _by_group(weights: Tensor, groups: Tensor, operation: Callable[..., Tensor], factors: Tensor) -> Tensor:
    """`operation` of weights [R, C], which it overwrites, and of each one's group's factor [R, G]."""
    (num_rows, num_columns), num_groups = weights.shape, factors.shape[1]
    run = num_columns // num_groups
    in_order = torch.arange(num_groups, device=groups.device).repeat_interleave(run)
    if run and torch.equal(groups, in_order):  # the usual case, and quicker
        view = weights.view(num_rows, num_groups, run)
        operation(view, factors.unsqueeze(2), out=view)
        return weights
    return operation(weights, factors.index_select(1, groups), out=weights)


def read_part(files: TensorFiles, name: str, shape: tuple[int, int], rows: range, columns: range) -> Tensor:
    """Those rows and columns of a tensor that must have `shape`."""
    return files.read(name, Piece(target=range(len(rows)), rows=rows, columns=columns, full_shape=shape))


def read_int32(files: TensorFiles, name: str, shape: tuple[int, int], rows: range, columns: range) -> Tensor:
    values = read_part(files, name, shape, rows, columns)
    _check_type(name, values, torch.int32)
    return values


def read_nibbles(
    files: TensorFiles,
    name: str,
    shape: tuple[int, int],
    rows: range,
    columns: range,
    *,
    packed_dim: int,
    order: tuple[int, ...] = tuple(range(NIBBLES)),
    word_offset: int = 0,
    transposed: bool = False,
) -> Tensor:
    """uint8, contiguous: `rows` and `columns` of a matrix of 4-bit numbers, [shape] in whole; or their transpose.

    It is stored as int32, eight numbers of neighbours along `packed_dim` in one; neighbour i sits in bits 4 * order[i]
    and up. `word_offset` is added to whole words first. Only those that hold what is asked for are read.
    """
    spans, stored_shape = [rows, columns], list(shape)
    wanted = spans[packed_dim]
    spans[packed_dim] = range(wanted.start // NIBBLES, -(-wanted.stop // NIBBLES))
    stored_shape[packed_dim] = -(-shape[packed_dim] // NIBBLES)
    words = read_int32(files, name, (stored_shape[0], stored_shape[1]), spans[0], spans[1]) + word_offset
    if transposed:  # eight times less to move than afterwards
        words, packed_dim = words.t().contiguous(), 1 - packed_dim
    first = wanted.start % NIBBLES
    return _unpack(words, packed_dim, order).narrow(packed_dim, first, len(wanted)).contiguous()


def _unpack(words: Tensor, packed_dim: int, order: tuple[int, ...]) -> Tensor:
    """int32 -> uint8, eight times as long along `packed_dim`."""
    shape = [*words.shape[: packed_dim + 1], NIBBLES, *words.shape[packed_dim + 1 :]]
    numbers = torch.empty(shape, dtype=torch.uint8)
    for neighbour, position in enumerate(order):
        numbers.select(packed_dim + 1, neighbour).copy_((words >> 4 * position).bitwise_and_(15))
    return numbers.flatten(packed_dim, packed_dim + 1)


def read_scales(files: TensorFiles, name: str, shape: tuple[int, int], rows: range, columns: range) -> Tensor:
    """float32, of scales in any floating-point type with a sign and a fraction."""
    scales = read_part(files, name, shape, rows, columns)
    if scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{name} has the type {scales.dtype}, which is not supported for scales")
    return scales.float()


def group_span(columns: range, group_size: int) -> range:
    """The groups that `columns` touch."""
    return range(columns.start // group_size, -(-columns.stop // group_size))


def column_groups(columns: range, group_size: int, first_group: int) -> Tensor:
    """int64 [C]: the group of each column, counted from `first_group`."""
    return torch.arange(columns.start, columns.stop) // group_size - first_group


def _check_type(name: str, values: Tensor, dtype: torch.dtype) -> None:
    if values.dtype != dtype:
        raise ValueError(f"{name} has the type {values.dtype}, the format calls for {dtype}")
