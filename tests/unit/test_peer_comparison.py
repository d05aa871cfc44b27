"""Comparing servers: whole process trees, adapters' commands, and what is made of the records."""

from __future__ import annotations

import errno
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import refuse_amx
from benchmarks.peers.compare import make_system
from benchmarks.peers.comparison import report
from benchmarks.peers.conditions import LAUNCHER, OLDER_CPU_FOLDER, Conditions
from benchmarks.peers.process_tree import ProcessTree
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.system import Setting, System


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_setting(tmp_path: Path) -> Setting:
    return Setting(
        peers=tmp_path,
        model=tmp_path / "model",
        gguf=tmp_path / "gguf",
        num_threads=2,
        max_num_seqs=8,
        max_model_len=512,
        kv_gib=1.0,
        port=8390,
    )


def record(system: str, seed: int, *, tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
    run = {
        "num_requests": 4,
        "num_failed": 0,
        "wall_s": 1.0,
        "output_tokens_per_s": tokens_per_s,
        "ttft_p50_ms": ttft_ms,
        "pss_bytes": 3 << 20,
        "errors": [],
    }
    return {
        "system": system,
        "version": "1",
        "seed": seed,
        "calibration": {"read_gb_per_s": 10.0, "fp32_gflop_per_s": 100.0},
        "start_s": 1.0 if system.startswith("ours") else 8.0,
        "start_pss_bytes": 2 << 20,
        "num_processes": 1,
        "workloads": {"W2": [run]},
    }


def test_the_tree_finds_children_that_left_their_parent() -> None:
    tree = ProcessTree()
    script = "setsid sleep 60 & sleep 60"
    root = subprocess.Popen(["sh", "-c", script], env={"PATH": "/usr/bin:/bin", **tree.environment})
    tree.follow(root.pid)
    wait_until(lambda: len(tree.processes()) == 3)
    assert tree.pss_bytes() > 0
    assert tree.kill(timeout_s=5.0) == 3
    root.wait(5)
    wait_until(lambda: not tree.processes())


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    system = System("peer", [sys.executable, "-c", "print('no such option'); raise SystemExit(3)"], "1")
    with (
        pytest.raises(ServerError, match="ended with 3:\nno such option"),
        Server(system, free_port(), tmp_path / "log", start_timeout_s=10.0),
    ):
        pass


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_server_is_up_when_it_answers_and_gone_afterwards(tmp_path: Path) -> None:
    port = free_port()
    system = System("peer", [sys.executable, "-m", "http.server", str(port), "-b", "127.0.0.1"], "1", health="/")
    with Server(system, port, tmp_path / "log", start_timeout_s=10.0) as server:
        assert server.start_s > 0
        assert len(server.tree.processes()) == 1
    assert not server.tree.processes()


def test_every_adapter_names_what_it_needs_before_anything_is_started(tmp_path: Path) -> None:
    for name in ("ours-int8", "ours-int4", "vllm-bf16", "llama-q8_0", "transformers-cb-fp32"):
        system = make_system(name, make_setting(tmp_path), ["--more"])
        assert system.name == name
        assert system.missing()
        assert "8390" in " ".join(system.command)
        assert system.command[-1] == "--more"


def test_unknown_systems_and_variants_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no system 'tgi'; give one of ours-"):
        make_system("tgi-fp32", make_setting(tmp_path))
    with pytest.raises(ValueError, match="'q3'; give one of llama-f32"):
        make_system("llama-q3", make_setting(tmp_path))


def test_without_amx_every_system_starts_behind_the_filter_with_a_cache_of_its_own(tmp_path: Path) -> None:
    conditions = Conditions(without_amx=True, peers=tmp_path)
    for name in ("ours-int8", "vllm-bf16", "llama-q8_0", "transformers-cb-fp32"):
        system = make_system(name, make_setting(tmp_path))
        with conditions.applied(system) as changed:
            assert changed.command[: len(LAUNCHER) + 1] == [*LAUNCHER, system.command[0]]
            assert changed.environment["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_VNNI"
            assert "older_cpu" in changed.environment["PYTHONPATH"]
            for variable in system.cache_variables:
                assert Path(changed.environment[variable]).parent == tmp_path / "cache-without-amx"


def test_cold_starts_get_an_empty_cache_that_is_gone_afterwards(tmp_path: Path) -> None:
    system = make_system("ours-fp32", make_setting(tmp_path))
    with Conditions(cold=True).applied(system) as changed:
        folder = Path(changed.environment["ANTIPHON_CACHE"])
        assert list(folder.iterdir()) == []
        assert changed.command == system.command
        assert "model.cache_dir=null" in system.command  # else the preset's
    assert not folder.exists()


def test_records_made_otherwise_are_not_resumed_and_the_report_says_what_was_special(tmp_path: Path) -> None:
    made = record("ours-fp32", 0, tokens_per_s=1.0, ttft_ms=1.0)
    with pytest.raises(ValueError, match="made without --cold; give another --json"):
        Conditions(cold=True).check([made])
    with pytest.raises(ValueError, match="made with --cold"):
        Conditions().check([made | {"cold": True}])
    Conditions().check([made])
    assert "withheld" not in report([made])
    assert "AMX was withheld from every system" in report([made | {"without_amx": True}])
    assert "Every start was a first one" in report([made | {"cold": True}])


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="AMX is of x86-64")
def test_no_process_behind_the_filter_is_handed_amx_and_all_else_works() -> None:
    ask = f"import sys; sys.path.insert(0, {str(Path(refuse_amx.__file__).parent)!r}); import refuse_amx"
    say = "print(refuse_amx.amx_refusal(), flush=True)"
    code = f"{ask}; {say}; import subprocess; subprocess.run([sys.executable, '-c', {f'{ask}; {say}'!r}]); sys.exit(3)"
    done = subprocess.run([*LAUNCHER, sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout.split(), done.stderr, done.returncode) == ([str(errno.EPERM)] * 2, "", 3)


def test_a_cpu_without_anything_newer_than_vnni_is_what_pytorch_reports(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    capabilities = {"avx512_vnni": True, "avx512_bf16": True, "amx_tile": True, "num_sockets": 1}
    (tmp_path / "torch" / "cpu.py").write_text(f"def get_capabilities():\n    return {capabilities}\n")
    code = "import torch.cpu; print(dict(torch.cpu.get_capabilities()))"
    environment = {"PYTHONPATH": f"{OLDER_CPU_FOLDER}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environment)
    assert done.stdout.strip() == str(capabilities | {"avx512_bf16": False, "amx_tile": False})


def test_ratios_are_of_the_same_repeat_and_more_is_always_better() -> None:
    records = [
        record("ours-fp32", 0, tokens_per_s=20.0, ttft_ms=100.0),
        record("vllm-fp32", 0, tokens_per_s=10.0, ttft_ms=400.0),
        record("ours-fp32", 1, tokens_per_s=60.0, ttft_ms=100.0),
        record("vllm-fp32", 1, tokens_per_s=20.0, ttft_ms=200.0),
        record("ours-fp32", 2, tokens_per_s=90.0, ttft_ms=100.0),  # its peer has not run yet
    ]
    written = report(records)
    assert "| ours-fp32 / vllm-fp32 | W2 | 2.50 (2.00-3.00) | 3.00 (2.00-4.00) |" in written
    assert "time 8.00, memory 1.00" in written
    assert "10.0 (10.0-10.0) GB/s" in written
    assert "exactly the tokens" in written


def test_a_failed_start_is_in_the_report_and_spoils_nothing() -> None:
    failed = {"system": "vllm-fp32", "version": "1", "seed": 0, "calibration": None, "error": "ended with 1"}
    written = report([record("ours-fp32", 0, tokens_per_s=20.0, ttft_ms=1.0), failed])
    assert "| vllm-fp32 | 1 | 0 of 1 |" in written
    assert "vllm-fp32, seed 0: ended with 1" in written
