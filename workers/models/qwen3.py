"""Qwen3: Llama's layer with a norm on each query and key head, which the spec's `qk_norm` turns on."""

from __future__ import annotations

from workers.layers.parameter import BuildContext
from workers.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    def __init__(self, context: BuildContext) -> None:
        assert context.spec.qk_norm, "a Qwen3 checkpoint has q_norm and k_norm"
        super().__init__(context)
