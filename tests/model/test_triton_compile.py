"""The Triton kernels, compiled ahead of time for GPUs that are not there: they compile, fit, and spill no register."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_MEMORY_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
CALL_FRAME_BYTES = 16
"""Stack of a kernel that calls a function (a float64 logarithm); spills come on top and are far larger."""


@cache
def compiled_for(capability):
    """In a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_launches", str(capability)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", sorted(SHARED_MEMORY_BYTES))
def test_every_architecture_runs_attention_on_its_matrix_units(capability):
    kernels = compiled_for(capability)
    assert {"prefill_kernel", "decode_kernel", "merge_kernel", "draw_kernel"} <= {k["kernel"] for k in kernels}
    prefill = next(k for k in kernels if k["kernel"] == "prefill_kernel")
    assert MATRIX_INSTRUCTION[capability] in prefill["instructions"]
    assert max(k["shared_bytes"] for k in kernels) <= SHARED_MEMORY_BYTES[capability]


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_keys_in_fp8_are_written_and_read_by_the_devices_own_conversion(capability):
    converting = {k["kernel"] for k in compiled_for(capability) if "e4m3x2" in k["instructions"]}
    assert {"store_kv_kernel", "prefill_kernel", "decode_kernel"} <= converting


@pytest.mark.parametrize(
    ("capability", "instruction"), [(90, "wgmma.mma_async"), (100, "tcgen05.mma"), (120, "mma.sync")]
)
def test_products_of_fp8_for_many_tokens_are_the_matrix_units_own(capability, instruction):
    products = [k["instructions"] for k in compiled_for(capability) if k["kernel"] == "fp8_product_kernel"]
    assert len(products) == 4
    of_fp8 = [
        any(instruction in line and ("e4m3" in line or "f8f6f4" in line) for line in text.splitlines())
        for text in products
    ]
    assert all(of_fp8[1:])  # the first is for one token, where sm_90 and sm_100 convert


def test_nothing_spills_on_hopper():
    spilling = [
        (k["kernel"], k["registers"], k["stack_bytes"])
        for k in compiled_for(90)
        if k["stack_bytes"] > (CALL_FRAME_BYTES if k["kernel"] == "draw_kernel" else 0) or k["local_bytes"]
    ]
    assert spilling == []


def test_keys_are_copied_ahead_on_hopper():
    decodes = [k for k in compiled_for(90) if k["kernel"] == "decode_kernel"]
    assert len(decodes) == 6
    assert all("cp.async" in k["instructions"] for k in decodes)
