"""llama.cpp's server, built from source."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from benchmarks.peers.system import MODEL_NAME, Setting, System, unknown_variant

VARIANTS = {"f32": "F32.gguf", "q8_0": "Q8_0.gguf", "q4_1": "Q4_1.gguf"}


def system(variant: str, setting: Setting) -> System:
    if variant not in VARIANTS:
        raise unknown_variant("llama", variant, VARIANTS)
    program = setting.peers / "llama.cpp" / "bin" / "llama-server"
    weights = setting.gguf / VARIANTS[variant]
    command = [
        str(program), "--model", str(weights), "--alias", MODEL_NAME,
        "--threads", str(setting.num_threads),
        # One cache for all slots: a sequence may be as long as the model allows, whatever the number of slots.
        "--parallel", str(setting.max_num_seqs), "--kv-unified",
        "--ctx-size", str(setting.max_num_seqs * setting.max_model_len),
        "--flash-attn", "on",
        "--host", "127.0.0.1",
        "--port", str(setting.port),
    ]  # fmt: skip
    return System(f"llama-{variant}", command, f"llama.cpp {_version(program)}", needed=(program, weights))


def _version(program: Path) -> str:
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "not installed"
    found = re.search(r"version:\s*(.+)", done.stdout + done.stderr)
    return found[1].strip() if found else "of unknown version"
