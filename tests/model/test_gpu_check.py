"""The GPU check from end to end on a CPU at small sizes: kernels interpreted, the clock and memory books made up."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from benchmarks import gpu_check, gpu_kernels, gpu_model, gpu_quantized, gpu_scene, gpu_sections
from benchmarks.gpu_scene import Ceilings

pytestmark = pytest.mark.usefixtures("one_thread")

REPOSITORY = Path(__file__).resolve().parents[2]
_IMPORT_WITHOUT_THE_REST = """
import sys
for name in ("ray", "msgspec", "typer", "rich", "gguf", "yaml", "tokenizers", "transformers", "fastapi", "aiohttp"):
    sys.modules[name] = None
from benchmarks import gpu_check, gpu_sections, gpu_tune
"""
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 10_000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALLER_SIZES = {
    "MIXED": {"query_lens": [5, 9, 1, 1], "seq_lens": [5, 40, 17, 300], "num_decodes": 2},
    "ATTENTION_CASES": gpu_kernels.ATTENTION_CASES[5:-1:4],
    "FP8_CASES": gpu_kernels.FP8_CASES[3:4],
    "DECODE_SHAPES": [(2, 40)],
    "PREFILL_SHAPES": [(1, 8, 8), (1, 8, 16)],
    "CHECKED_TOKENS": 3,
    "LAYER_TOKENS": (2,),
    "CHECKED_DRAWS": 4,
    "SAMPLED_ROWS": (2,),
    "VOCAB_SIZE": 600,
}


class Event:
    """Of a device on which everything takes 2 ms. Nothing has come to pass that nobody waited for."""

    num_recorded = num_passed = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.num_recorded += 1
        self.number = Event.num_recorded

    def synchronize(self):
        Event.num_passed = max(Event.num_passed, self.number)

    def elapsed_time(self, later):
        assert self.number < later.number <= Event.num_passed, "both events must be completed"
        return 2.0


@pytest.fixture
def on_cpu(monkeypatch):
    def run_once(run, **_):
        run()
        return 1e-3

    for module in (gpu_scene, gpu_kernels, gpu_quantized, gpu_model):
        monkeypatch.setattr(module, "DEVICE", CPU)
        for name, fake in (("seconds_of", run_once), ("timed", run_once), ("has_fp8", lambda device: True)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
    for name, value in SMALLER_SIZES.items():
        monkeypatch.setattr(gpu_kernels, name, value)
    for name, value in (("MATRICES", ((48, 256),)), ("TOKENS", (1, 20)), ("BLOCK_MATRICES", ((48, 400),))):
        monkeypatch.setattr(gpu_quantized, name, value)
    monkeypatch.setattr(gpu_quantized, "kernel_unavailable", lambda *_: None)
    monkeypatch.setattr(gpu_model, "SHAPES", {name: shape | SMALL for name, shape in gpu_model.SHAPES.items()})
    monkeypatch.setattr(gpu_model, "time_engine", functools.partial(gpu_model.time_engine, num_seqs=2))
    monkeypatch.setattr(gpu_model, "time_steps", functools.partial(gpu_model.time_steps, batches=(1, 5)))
    make_config = gpu_model.make_config

    def make_cpu_config(**options):
        config = make_config(**options)
        worker = replace(config.worker, device="cpu", attention_backend="reference", cpu_kernels="pytorch")
        return replace(config, worker=worker)

    monkeypatch.setattr(gpu_model, "make_config", make_cpu_config)
    monkeypatch.setattr(gpu_sections, "measure_ceilings", lambda: Ceilings(4e12, 8e14))
    properties = SimpleNamespace(name="a card", major=9, minor=0, multi_processor_count=132)
    free = iter([1000, 1000 - 290])
    for name, fake in (
        ("Event", Event),
        ("synchronize", lambda *_: None),
        ("_sleep", lambda cycles: None),
        ("set_sync_debug_mode", lambda mode: None),
        ("get_device_properties", lambda device: properties),
        ("mem_get_info", lambda device: (next(free), 1000)),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)


def test_every_section_runs_and_finds_everything_right(on_cpu):
    """Whatever is made on the default device, instead of the sections' own, has no numbers, and shows."""
    written = []
    with torch.device("meta"):
        is_right = gpu_sections.run(None, written.append)
    report = "\n".join(written)
    assert is_right, report
    for title, columns, _ in gpu_sections.sections(Ceilings(1.0, 1.0)).values():
        header = f"## {title}\n\n| {' | '.join(columns)} |\n"
        assert header in report
        rows = report.partition(header)[2].partition("\n\n")[0].splitlines()[1:]
        assert rows, f"{title} has no rows"
        assert all(row.count(" | ") == len(columns) - 1 for row in rows)
    for kept in ("over fp8", "storing in float8_e4m3fn", "KV in fp8", "fp8 in blocks", "blocks of 64, float8_e4m3fn"):
        assert kept in report


def test_a_kernel_that_is_off_is_told(on_cpu, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "TOLERANCE", dict.fromkeys(gpu_kernels.TOLERANCE, 1e-12))
    written = []
    assert not gpu_sections.run(["attention"], written.append)
    assert "WRONG" in "\n".join(written)


@pytest.mark.parametrize("missing", [("xxhash",), ("triton", "safetensors")])
def test_a_machine_that_lacks_packages_is_told_which(missing, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name in missing else name)
    assert gpu_check.main() == 2
    assert capsys.readouterr().err.rstrip().endswith(f"pip install {' '.join(missing)}")


def test_nothing_else_is_imported_than_what_the_check_asks_for():
    """In a process of its own, in which any other package of ours is missing."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_WITHOUT_THE_REST], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
