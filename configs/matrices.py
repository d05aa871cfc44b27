"""The matrices of a decoder layer as a rank holds them, and the bytes of weights that follow.

Pure arithmetic over a `ModelSpec`; knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.model_spec import DTYPE_BYTES, ModelSpec
from configs.sharding import ALIGNMENT, split_heads, split_range


@dataclass(frozen=True, slots=True)
class Matrix:
    """One product of a layer: rows from one or several of the checkpoint's modules, and the columns that it reads."""

    modules: tuple[str, ...]
    num_rows: int
    columns: range

    @property
    def num_parameters(self) -> int:
        return self.num_rows * len(self.columns)


def split_inner(spec: ModelSpec, num_ranks: int) -> tuple[range, ...]:
    """The inner features of the MLP that each rank holds.

    Cut where groups of quantised weights end, if there are enough of them, so that each part can stay as it is.
    """
    size, quantization = spec.intermediate_size, spec.quantization
    group = None if quantization is None else quantization.column_group
    if group is None or size % group or size // group < num_ranks:
        return split_range(size, num_ranks, ALIGNMENT)
    return tuple(range(part.start * group, part.stop * group) for part in split_range(size // group, num_ranks))


def layer_matrices(spec: ModelSpec, rank: int, num_ranks: int) -> tuple[Matrix, ...]:
    """What `rank` of `num_ranks` holds of every layer's matrices."""
    shard = split_heads(spec.num_heads, spec.num_kv_heads, num_ranks)[rank]
    inner = split_inner(spec, num_ranks)[rank]
    heads = range(shard.heads.start * spec.head_dim, shard.heads.stop * spec.head_dim)
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_width = len(heads) + 2 * shard.num_kv_heads * spec.head_dim
    hidden = range(spec.hidden_size)
    return (
        Matrix(attention, qkv_width, hidden),
        Matrix(("self_attn.o_proj",), spec.hidden_size, heads),
        Matrix(("mlp.gate_proj", "mlp.up_proj"), 2 * len(inner), hidden),
        Matrix(("mlp.down_proj",), spec.hidden_size, inner),
    )


def num_parameters(spec: ModelSpec) -> int:
    """Of the whole model."""
    return num_rank_parameters(spec, 0, 1)


def num_rank_parameters(spec: ModelSpec, rank: int, num_ranks: int) -> int:
    """Parameters that `rank` of `num_ranks` holds: its parts of the matrices, and all norms."""
    matrices = layer_matrices(spec, rank, num_ranks)
    qkv, _, gate_up, _ = matrices
    vocab = len(split_range(spec.vocab_size, num_ranks, ALIGNMENT)[rank])
    hidden = spec.hidden_size
    layer = sum(matrix.num_parameters for matrix in matrices)
    layer += spec.attention_bias * qkv.num_rows + spec.attention_output_bias * hidden
    layer += spec.mlp_bias * (gate_up.num_rows + hidden)
    layer += spec.qk_norm * 2 * spec.head_dim + (4 if spec.post_norms else 2) * hidden
    num_embeddings = 1 if spec.tie_word_embeddings else 2
    return spec.num_layers * layer + hidden + num_embeddings * vocab * hidden


def weight_bytes(spec: ModelSpec, dtype: str, *, kept: bool = False) -> int:
    """Of the whole model on one rank. `kept`: as `rank_weight_bytes` says."""
    return rank_weight_bytes(spec, 0, 1, dtype, kept=kept)


def rank_weight_bytes(spec: ModelSpec, rank: int, num_ranks: int, dtype: str, *, kept: bool = False) -> int:
    """Of what `rank` of `num_ranks` holds in memory.

    `kept`: quantised matrices stay in their few bits where a kernel can compute with them, as on a GPU; otherwise
    they are dequantised at load, and take as much as any others.
    """
    size, quantization = DTYPE_BYTES[dtype], spec.quantization
    total = num_rank_parameters(spec, rank, num_ranks) * size
    if not kept or quantization is None or quantization.kernel_refusal(dtype):
        return total
    for matrix in layer_matrices(spec, rank, num_ranks):
        if quantization.can_keep(matrix.num_rows, matrix.columns):
            saved = matrix.num_parameters * size - quantization.kept_bytes(matrix.num_rows, len(matrix.columns))
            names = ([f"model.layers.{i}.{module}" for module in matrix.modules] for i in range(spec.num_layers))
            total -= saved * sum(all(map(quantization.is_quantized, modules)) for modules in names)
    return total
