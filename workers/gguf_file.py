"""Reading a GGUF file: metadata and where each tensor lies. Layout: the ggml project's docs/gguf.md, versions 2 and 3.

Parses the whole header in a fraction of a second, and maps the tensors without reading them. Knows no model.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is in row-major order (outermost first); `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * block_bytes


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. ValueError: not a GGUF file, or a damaged one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 4
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            self.close()
            raise ValueError(f"{path} is damaged or cut short: its header cannot be read ({error})") from error
        last = max(self.tensors.values(), key=lambda t: t.offset, default=None)
        if last is not None and last.offset + last.num_rows * last.row_bytes > len(self._map):
            size = len(self._map)
            self.close()
            raise ValueError(f"{path} is cut short: its {size} bytes end before tensor {last.name}; fetch it again")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with suppress(BufferError):  # an error's traceback may still hold rows; the map then goes with them
            self._map.close()

    def rows(self, tensor: GgufTensor, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Those rows of a tensor, dequantised: [len(rows), shape[-1]]."""
        size = tensor.num_rows * tensor.row_bytes
        data = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=tensor.offset)
        picked = data.reshape(tensor.num_rows, tensor.row_bytes)[rows]
        if tensor.kind == gguf.GGMLQuantizationType.F32:
            return picked.view(np.float32)
        if tensor.kind == gguf.GGMLQuantizationType.F16:
            return picked.view(np.float16).astype(np.float32)
        return gguf.quants.dequantize(picked, tensor.kind)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are, little-endian)")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = {self._string(): self._value(self._scalar("<I")) for _ in range(num_keys)}
        found = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        tensors = {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}
        return metadata, tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._string()
        dimensions = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        number = self._scalar("<I")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{self.path}: tensor {name} has the unknown type {number}") from None
        return name, tuple(reversed(dimensions)), kind, self._scalar("<Q")

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._map, self._position)
        self._position += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._map):
            raise IndexError("a string reaches past the end")
        return self._map[start : self._position].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(SCALARS[kind])
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item in (STRING, ARRAY):
            return [self._value(item) for _ in range(count)]
        values = np.frombuffer(self._map, dtype=np.dtype(SCALARS[item]), count=count, offset=self._position)
        self._position += values.nbytes
        return values.tolist()
