"""How a checkpoint's weights are quantised, read from the `quantization_config` of its config.json.

Owns which formats and variants are served; others are refused by name. Also says which matrices may stay in few bits
where a kernel computes with them. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["fp8", "awq", "gptq", "float-quantized", "pack-quantized"]

REMEDY = "use the unquantised checkpoint, a .gguf file, or one in fp8, awq, gptq or compressed-tensors format"
INT4_KERNEL_GROUPS = (256, 128, 64, 32)
"""Input features that may share a scale in torch's packed 4-bit product."""
FP8_KERNEL_WIDTHS = (128, 64, 32)
"""Columns of a block of fp8 weights that the own product takes; any number of rows may share its scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """One weight scheme for all quantised matrices. Sizes count rows (output features) and columns (input features)."""

    format: Format
    block: tuple[int, int] | None = None  # fp8: rows and columns that share a scale; None: per tensor or per row
    group_size: int | None = None  # 4 bits: columns that share a scale; None: a whole row does
    symmetric: bool = True  # 4 bits: no zero points, as far as the format can leave them out
    act_order: bool = False  # 4 bits: a column's group is looked up, neighbours may differ
    zero_offset: int = 0  # gptq: added to the zero points that the file holds
    quantized_activations: bool = True  # fp8: the checkpoint was made for activations in 8 bits as well
    targets: tuple[str, ...] = ("Linear",)  # "Linear": every matrix
    ignored: tuple[str, ...] = ()  # modules whose weights are not quantised

    @property
    def bits(self) -> int:
        return 8 if self.format in ("fp8", "float-quantized") else 4

    @property
    def column_group(self) -> int | None:
        """Neighbouring columns that share their scales; None: all do, or no neighbours."""
        if self.block is not None:
            return self.block[1]
        return None if self.act_order else self.group_size

    def describe(self) -> str:
        """For logs and tables: "gptq, 4 bits, groups of 128"."""
        if self.bits == 8:
            shared = "per tensor or row" if self.block is None else "in blocks of {} x {}".format(*self.block)
            return f"{self.format}, 8 bits, scales {shared}"
        groups = "one group per row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.format}, 4 bits, {groups}"

    def is_quantized(self, module: str) -> bool:
        """Whether the matrix of `module` ("model.layers.0.mlp.down_proj") is quantised, as the configuration says."""
        targeted = "Linear" in self.targets or any(_matches(module, target) for target in self.targets)
        return targeted and not any(_matches(module, pattern) for pattern in self.ignored)

    def kernel_refusal(self, dtype: str) -> str | None:
        """Why no kernel computes with weights as they are stored, whatever the card; None: one may."""
        if dtype != "bfloat16":
            return f"the kernels for {self.bits} bits compute in bfloat16, not {dtype}; model.dtype decides"
        if self.block is not None and self.block[1] not in FP8_KERNEL_WIDTHS:
            return f"no kernel for blocks of {self.block[1]} columns"
        if self.bits == 8 and not self.quantized_activations:
            return "made for activations that are not quantised"
        if self.act_order:
            return "the columns of a group are scattered (desc_act or actorder)"
        if self.bits == 4 and self.group_size is not None and self.kernel_group(self.group_size) is None:
            return f"no kernel for groups of {self.group_size}"
        return None

    def can_keep(self, num_rows: int, columns: range) -> bool:
        """Whether a kernel takes a matrix of this size, given the columns that a rank holds: groups must be whole."""
        if not num_rows or not columns:
            return False
        if self.bits == 8:
            at_border = self.block is None or columns.start % self.block[1] == 0
            return at_border and num_rows % 16 == 0 and len(columns) % 16 == 0
        group = self.kernel_group(len(columns))
        at_borders = self.group_size is None or columns.start % self.group_size == len(columns) % self.group_size == 0
        return group is not None and at_borders and num_rows % 8 == 0

    def kernel_group(self, num_columns: int) -> int | None:
        """4 bits: the widest group that the kernel knows and that divides the checkpoint's; None: there is none."""
        size = self.group_size or num_columns
        return next((group for group in INT4_KERNEL_GROUPS if size % group == 0), None)

    def kept_bytes(self, num_rows: int, num_columns: int) -> int:
        """Of a matrix that `can_keep`, with its scales (and zero points)."""
        if self.bits == 8:
            num_groups = 1 if self.block is None else -(-num_columns // self.block[1])
            return num_rows * (num_columns + 4 * num_groups)
        group = self.kernel_group(num_columns)
        assert group is not None
        return num_rows * (num_columns // 2 + 4 * (num_columns // group))


def read_quantization(config: Mapping[str, Any]) -> QuantizationSpec | None:
    """None: the weights are not quantised.

    Raises:
        ValueError: a method or variant that is not served, by name.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    method = str(quantization.get("quant_method", "unnamed"))
    readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
    if method not in readers:
        raise ValueError(f"{method} quantised weights are not supported; {REMEDY}")
    return readers[method](quantization)


def _fp8(config: Mapping[str, Any]) -> QuantizationSpec:
    _require("fp8", config, fmt=("e4m3", "float8_e4m3fn", None), activation_scheme=("dynamic", "static", None))
    return QuantizationSpec(
        format="fp8",
        block=_block("fp8", config.get("weight_block_size")),
        ignored=_names(config, "modules_to_not_convert", "ignored_layers"),
    )


def _awq(config: Mapping[str, Any]) -> QuantizationSpec:
    version = str(config.get("version", "gemm")).lower()
    _require("awq", config, bits=(4,), zero_point=(True, None))
    if version != "gemm":
        raise ValueError(f"awq with version {version!r} is not supported, only 'gemm'; {REMEDY}")
    return QuantizationSpec(
        format="awq",
        group_size=_group_size("awq", config),
        symmetric=False,
        ignored=_names(config, "modules_to_not_convert"),
    )


def _gptq(config: Mapping[str, Any]) -> QuantizationSpec:
    _require("gptq", config, bits=(4,), checkpoint_format=("gptq", "gptq_v2", "", None))
    for key in ("dynamic", "is_marlin_format"):
        if config.get(key):
            raise ValueError(f"gptq with {key} is not supported; {REMEDY}")
    return QuantizationSpec(
        format="gptq",
        group_size=_group_size("gptq", config),
        symmetric=bool(config.get("sym", True)),
        act_order=bool(config.get("desc_act", False)),
        zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1,
        ignored=_names(config, "modules_to_not_convert"),
    )


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationSpec:
    method = "compressed-tensors"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"{method} with sparsity format {sparsity!r} is not supported; {REMEDY}")
    if config.get("transform_config"):
        raise ValueError(f"{method} with transform_config is not supported; {REMEDY}")
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise ValueError(f"{method} without config_groups is not supported; {REMEDY}")
    schemes = [(group.get("weights"), group.get("input_activations"), _format_of(group, config)) for group in groups]
    if any(scheme != schemes[0] for scheme in schemes[1:]):
        raise ValueError(f"{method} with several weight schemes is not supported; {REMEDY}")
    weights, activations, layout = schemes[0]
    targets = tuple(target for group in groups for target in group.get("targets", ("Linear",)))
    names = {"targets": targets, "ignored": _names(config, "ignore")}
    if layout in ("float-quantized", "naive-quantized"):  # the older name; the tensors are the same
        return _float_quantized(layout, weights or {}, activations, names)
    if layout == "pack-quantized":
        return _pack_quantized(weights or {}, activations, names)
    raise ValueError(f"{method} format {layout!r} is not supported; {REMEDY}")


def _format_of(group: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    return str(group.get("format") or config.get("format"))


def _float_quantized(
    layout: str, weights: Mapping[str, Any], activations: Any, names: dict[str, Any]
) -> QuantizationSpec:
    name = f"compressed-tensors {layout}"
    _require(name, weights, num_bits=(8,), type=("float",), strategy=("tensor", "channel", "block"))
    if activations:
        _require(f"{name} activations", activations, num_bits=(8,), type=("float",))
    block = weights.get("block_structure") if weights["strategy"] == "block" else None
    return QuantizationSpec(
        format="float-quantized", block=_block(name, block), quantized_activations=bool(activations), **names
    )


def _pack_quantized(weights: Mapping[str, Any], activations: Any, names: dict[str, Any]) -> QuantizationSpec:
    name = "compressed-tensors pack-quantized"
    _require(name, weights, num_bits=(4,), type=("int",), strategy=("group", "channel"))
    if activations:
        raise ValueError(f"{name} with quantised activations is not supported; {REMEDY}")
    return QuantizationSpec(
        format="pack-quantized",
        group_size=_group_size(name, weights) if weights["strategy"] == "group" else None,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=weights.get("actorder") in ("group", True),
        **names,
    )


def _require(name: str, config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        if config.get(key) not in values:
            known = ", ".join(str(value) for value in values if value is not None and value != "")
            raise ValueError(f"{name} with {key} {config.get(key)!r} is not supported (served: {known}); {REMEDY}")


def _group_size(name: str, config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size", -1)
    if size in (-1, None):
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} with group_size {size!r} is not supported; {REMEDY}")
    return size


def _block(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # "128x128", as compressed-tensors also writes it
        value = [int(part) for part in value.split("x")]
    if len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise ValueError(f"{name} with blocks of {value!r} is not supported; {REMEDY}")
    return value[0], value[1]


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(str(name) for key in keys for name in config.get(key) or ())


def _matches(module: str, pattern: str) -> bool:
    """A "re:" pattern fits the start of a name; any other is the name, or parts of it between dots."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."
