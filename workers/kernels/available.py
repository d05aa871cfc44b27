"""Whether Triton's kernels run on a device: asked once, by running one.

Importing Triton proves little: it compiles at first use, with a C compiler and a driver that may be missing or too old.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

SMALLEST_CAPABILITY = (8, 0)


@cache
def triton_unavailable_reason(device: torch.device) -> str | None:
    """None if a small kernel ran there and gave what it should."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if torch.cuda.get_device_capability(device) < SMALLEST_CAPABILITY:
        return "it needs compute capability {}.{} or newer".format(*SMALLEST_CAPABILITY)
    try:
        from workers.kernels.triton.norm import rms_norm

        x = torch.tensor([[3.0, -4.0]], device=device)
        found = rms_norm(x, torch.ones(2, device=device), 0.0).tolist()[0]
    except Exception as failure:  # whatever it is, no kernel will do better
        return f"a trial kernel failed ({describe(failure)})"
    expected = [3.0 / 12.5**0.5, -4.0 / 12.5**0.5]
    is_right = all(abs(a - b) < 1e-5 for a, b in zip(found, expected, strict=True))
    return None if is_right else f"a trial kernel gave {found} instead of {expected}"


def describe(failure: Exception) -> str:
    """Its type and the first line of what it says, for a log line."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:200]}"
