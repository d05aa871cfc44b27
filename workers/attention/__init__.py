"""The attention backends and the choice among them, made once at start.

A new backend is one file and one line in `_BACKENDS`; its module is imported only when it is considered.
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
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(f"worker.attention_backend is {name!r}; give auto or one of {', '.join(_BACKENDS)}")
    refusals: list[str] = []
    for candidate in _BACKENDS if name == "auto" else (name,):
        backend = _load(candidate)
        reason = backend.unavailable_reason(
            device=device, dtype=dtype, head_dim=head_dim, block_size=block_size, soft_cap=soft_cap
        )
        if reason is None:
            log.info("attention backend: %s%s", candidate, f" ({'; '.join(refusals)})" if refusals else "")
            return backend()
        refusals.append(f"{candidate}: {reason}")
    raise ValueError(f"worker.attention_backend {name!r} cannot serve this model here: {'; '.join(refusals)}")


def _load(name: str) -> type[AttentionBackend]:
    module, _, attribute = _BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend
