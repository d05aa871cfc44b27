"""Everything that runs on a GPU: correct first, then how near to what the card can do.

    python -m benchmarks.gpu_check [--only attention layers ...] [--out benchmarks/results/DATE-gpu.md]

Needs one CUDA device and the packages in `NEEDED`; no Ray, no flash-attn, no network, no weights. Takes some minutes.
Each section prints its table as soon as it is done. Exits with 1 if anything was wrong or a section failed, and with 2
where it cannot run.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("torch", "triton", "numpy", "safetensors", "xxhash")
"""Packages. Nothing that needs them is imported before it is known that they are there."""


def why_not() -> str | None:
    """Why it cannot run here; None if it can."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"this check needs {', '.join(missing)}: pip install {' '.join(missing)}"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device here: the kernels' tests run without one, this check does not"
    return None


def main() -> int:
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    from benchmarks.gpu_sections import names, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names(), help="these sections alone")
    parser.add_argument("--out", type=Path, help="write the report there too")
    options = parser.parse_args()
    with ExitStack() as stack:
        files = [sys.stdout]
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            files.append(stack.enter_context(options.out.open("w", encoding="utf-8")))

        def write(part: str) -> None:
            for file in files:  # at once: what comes next may end the process
                print(part, file=file, flush=True)

        is_right = run(options.only, write)
        write("Everything is right." if is_right else "SOMETHING IS WRONG: see above.")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
