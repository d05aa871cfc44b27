"""This repository's own server: `deploy.py serve`, Ray and all."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.system import MODEL_NAME, Setting, System, unknown_variant

ROOT = Path(__file__).resolve().parents[2]
PRESET = "smollm2-135m-cpu"  # the basis; all that depends on the model or the comparison is overridden
VARIANTS = {
    "fp32": ("model.dtype=float32",),
    "bf16": ("model.dtype=bfloat16",),
    "int8": ("model.dtype=bfloat16", "model.quantization=int8", "cache.dtype=int8"),
    "int4": ("model.dtype=bfloat16", "model.quantization=int4", "cache.dtype=int8"),
}


def system(variant: str, setting: Setting) -> System:
    if variant not in VARIANTS:
        raise unknown_variant("ours", variant, VARIANTS)
    overrides = (
        f"model.path={setting.model.resolve()}",
        f"model.served_name={MODEL_NAME}",
        "model.cache_dir=null",  # as by default, instead of the preset's
        f"model.max_model_len={setting.max_model_len}",
        *VARIANTS[variant],
        f"cache.memory_gib={setting.kv_gib}",
        f"scheduler.max_num_seqs={setting.max_num_seqs}",
        f"worker.num_threads={setting.num_threads}",
        f"ingress.port={setting.port}",
        "cluster.address=local",
    )
    options = [word for override in overrides for word in ("--set", override)]
    return System(
        f"ours-{variant}",
        [sys.executable, str(ROOT / "deploy.py"), "serve", PRESET, *options],
        f"commit {_commit()}, ray {version('ray')}, torch {version('torch')}",
        needed=(setting.model,),
        cache_variables=("ANTIPHON_CACHE",),
    )


def _commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "(no git)"
