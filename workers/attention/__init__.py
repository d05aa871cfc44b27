"""The attention backends and the choice among them, made once at start.

A new backend is one file and one line in `_BACKENDS`; its module is imported only when it is considered. Two names
joined by a plus, as in "fa4+triton", take the prefill rows from the first and the decode rows from the second.
"""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from workers.attention.base import AttentionBackend, AttentionMetadata

__all__ = ["AttentionBackend", "AttentionMetadata", "choose_backend"]

log = logging.getLogger(__name__)

# In order of preference: the first one that can serve the model is chosen. The reference can serve every model.
_BACKENDS = {
    "fa3": "workers.attention.flash:Flash3Backend",
    "fa4": "workers.attention.flash:Flash4Backend",
    "flash_attn": "workers.attention.flash:Flash2Backend",
    "triton": "workers.attention.triton_paged:TritonPagedBackend",
    "reference": "workers.attention.reference:ReferenceBackend",
}


def choose_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    soft_cap: bool = False,
) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that can serve such a model on this device.

    Raises:
        ValueError: no such backend, or it cannot serve the model here; the message says why.
    """
    if "+" in name:
        parts = [
            choose_backend(
                part, device=device, dtype=dtype, head_dim=head_dim, block_size=block_size, soft_cap=soft_cap
            )
            for part in name.split("+", 1)
        ]
        return _pair(parts[0], parts[1])
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(f"worker.attention_backend is {name!r}; give auto or one of {', '.join(_BACKENDS)}")
    refusals: list[str] = []
    for candidate in _BACKENDS if name == "auto" else (name,):
        backend = _load(candidate)
        reason = backend.unavailable_reason(
            device=device, dtype=dtype, head_dim=head_dim, block_size=block_size, soft_cap=soft_cap
        )
        if reason is None:
            skipped = f" ({'; '.join(refusals)})" if refusals and device.type != "cpu" else ""
            log.info("attention backend: %s%s", candidate, skipped)
            return backend()
        refusals.append(f"{candidate}: {reason}")
    raise ValueError(f"worker.attention_backend {name!r} cannot serve this model here: {'; '.join(refusals)}")


def _pair(prefill: AttentionBackend, decode: AttentionBackend) -> AttentionBackend:
    from workers.attention.triton_paged import PairedBackend, TritonPagedBackend

    if not isinstance(prefill, TritonPagedBackend) or not isinstance(decode, TritonPagedBackend):
        raise ValueError(f"worker.attention_backend cannot join {prefill.name} and {decode.name}; give one alone")
    return PairedBackend(prefill, decode)


def _load(name: str) -> type[AttentionBackend]:
    module, _, attribute = _BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend
