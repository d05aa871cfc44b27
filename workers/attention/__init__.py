"""The attention backends and the choice among them, made once at start.

A new backend is one file and one line in `_BACKENDS`; its module is imported only when it is considered. Two names
joined by a plus, as in "fa4+triton", take the prefill rows from the first and the decode rows from the second.
"""

from __future__ import annotations

import logging
from importlib import import_module

from workers.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds, AttentionParams

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionNeeds", "AttentionParams", "choose_backend"]

log = logging.getLogger(__name__)

# In order of preference: the first one that can serve the model is chosen. The reference can serve every model.
_BACKENDS = {
    "fa3": "workers.attention.flash:Flash3Backend",
    "fa4": "workers.attention.flash:Flash4Backend",
    "flash_attn": "workers.attention.flash:Flash2Backend",
    "triton": "workers.attention.triton_paged:TritonPagedBackend",
    "reference": "workers.attention.reference:ReferenceBackend",
}


def choose_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that can serve `needs`.

    Raises:
        ValueError: no such backend, or it cannot serve the model here; the message says why.
    """
    if "+" in name:
        prefill, decode = name.split("+", 1)
        return _pair(choose_backend(prefill, needs), choose_backend(decode, needs))
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(f"worker.attention_backend is {name!r}; give auto or one of {', '.join(_BACKENDS)}")
    refusals: list[str] = []
    for candidate in _BACKENDS if name == "auto" else (name,):
        backend = _load(candidate)
        reason = backend.cache_refusal(needs) or backend.unavailable_reason(needs)
        if reason is None:
            if needs.device.type != "cpu":  # there nothing else is to be had, and the C++ kernels bring their own
                log.info("attention backend: %s%s", candidate, f" ({'; '.join(refusals)})" if refusals else "")
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
