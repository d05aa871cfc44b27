"""The models. A new one is a file here and a line in the registry."""

from workers.models.decoder import CausalLM
from workers.models.registry import build_model

__all__ = ["CausalLM", "build_model"]
