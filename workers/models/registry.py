"""From a model's spec to its class. Weights come afterwards, from `workers.weights`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from configs.model_spec import ModelSpec
from workers.attention.base import AttentionBackend
from workers.layers.ops import LayerOps, choose_ops
from workers.layers.parameter import BuildContext
from workers.models.decoder import CausalLM
from workers.models.gemma3 import Gemma3ForCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.models.qwen3 import Qwen3ForCausalLM
from workers.parallel import ParallelGroup
from workers.quantization.placement import Kernel, choose_kernel, place_matrices

MODELS: dict[str, Callable[[BuildContext], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}


def build_model(
    spec: ModelSpec,
    group: ParallelGroup,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: LayerOps | None = None,
    kernel: Kernel | None = None,
) -> CausalLM:
    """This rank's part of the model, its weights still uninitialised.

    Without `ops`, those that suit the device; likewise the `kernel` for weights that stay quantised.
    """
    device = torch.device(device)
    kernel = kernel or choose_kernel(spec, group, dtype, device)
    context = BuildContext(
        spec=spec,
        group=group,
        backend=backend,
        dtype=dtype,
        device=device,
        ops=ops or choose_ops(device),
        defer_matrices=kernel is not None,
    )
    model = MODELS[spec.architecture](context).eval()
    if kernel is not None:
        assert spec.quantization is not None, "a kernel for quantised weights, and none are"
        place_matrices(model, spec.quantization, kernel, dtype, device)
    return model
