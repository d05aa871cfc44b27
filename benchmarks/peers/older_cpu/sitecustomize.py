"""Makes PyTorch report a CPU with AVX-512 and VNNI, and with nothing newer.

Python imports this at start where its folder is on PYTHONPATH. Code that asks `torch.cpu` what the CPU has, such as
vLLM's choice of kernels and PyTorch's compiler, then chooses what it would on such a CPU. Touches nothing before
`torch.cpu` is imported, and nothing else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import MappingProxyType, ModuleType

MODULE = "torch.cpu"
NEWER = ("amx_", "avx10_", "avx_vnni", "avx_ne_convert", "avx512_bf16", "avx512_fp16", "avx512_bitalg", "avx512_ifma")
NEWER += ("avx512_vbmi", "avx512_vpopcntdq", "avx512_vp2intersect")


class _OlderCpu(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torch.cpu` where others do, and changes it once it is loaded."""

    _found: importlib.machinery.ModuleSpec

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return None
        self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        known = module.get_capabilities()
        older = {
            key: value and not key.startswith(NEWER) if isinstance(value, bool) else value
            for key, value in known.items()
        }
        module.get_capabilities = lambda: MappingProxyType(older)  # type: ignore[attr-defined]


sys.meta_path.insert(0, _OlderCpu())
