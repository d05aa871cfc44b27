"""`transformers serve`, in a virtual environment of its own. It takes texts alone and cannot ignore end of sequence."""

from __future__ import annotations

from benchmarks.peers.installed import installed_version
from benchmarks.peers.system import Setting, System, unknown_variant

CONTINUOUS = ("--continuous-batching", "--no-cb-use-cuda-graph")
VARIANTS = {
    "fp32": ("--dtype", "float32"),
    "bf16": ("--dtype", "bfloat16"),
    "cb-fp32": ("--dtype", "float32", *CONTINUOUS),
    "cb-bf16": ("--dtype", "bfloat16", *CONTINUOUS),
}


def system(variant: str, setting: Setting) -> System:
    if variant not in VARIANTS:
        raise unknown_variant("transformers", variant, VARIANTS)
    environment = setting.peers / "transformers"
    model = setting.model_without_eos
    command = [
        str(environment / "bin" / "transformers"), "serve", str(model),
        "--device", "cpu", *VARIANTS[variant],
        "--host", "127.0.0.1",
        "--port", str(setting.port),
    ]  # fmt: skip
    versions = [f"{name} {installed_version(environment, name)}" for name in ("transformers", "torch")]
    return System(
        f"transformers-{variant}",
        command,
        ", ".join(versions),
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setting.num_threads)},
        needed=(environment / "bin" / "transformers", model),
        model_name=str(model),
        omitted=frozenset({"ignore_eos", "stream_options"}),
        tokenizer_file=model / "tokenizer.json",
    )
