"""From a model's spec to its class. Weights come afterwards, from `workers.weights`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from configs.model_spec import ModelSpec
from workers.attention.base import AttentionBackend
from workers.layers.parameter import BuildContext
from workers.models.decoder import CausalLM
from workers.models.gemma3 import Gemma3ForCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.models.qwen3 import Qwen3ForCausalLM
from workers.parallel import ParallelGroup

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
) -> CausalLM:
    """This rank's part of the model, its weights still uninitialised."""
    context = BuildContext(spec=spec, group=group, backend=backend, dtype=dtype, device=torch.device(device))
    return MODELS[spec.architecture](context).eval()
