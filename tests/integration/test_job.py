"""A deployment that is submitted as a job to a running cluster, as on a real one."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.served import MARK, ROOT, processes_marked

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def wait_until(is_true: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if is_true():
            return True
        time.sleep(0.2)
    return False


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


class Head:
    """A cluster of one node that takes jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        port, dashboard, agent = free_ports(3)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.environment = os.environ | {
            MARK: self.mark,
            "RAY_AUTH_MODE": "disabled",
            "RAY_JOB_STOP_WAIT_TIME_S": "20",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the job says `python`
        }
        options = [
            *("--head", "--block", "--disable-usage-stats", "--include-dashboard=true", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}"),
            *(f"--dashboard-agent-listen-port={agent}", "--min-worker-port=0", "--max-worker-port=0"),
            f"--temp-dir={folder}",
        ]
        self.process = subprocess.Popen(
            [*RAY, "start", *options], env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def job(self, *arguments: str) -> str:
        command = [*RAY, "job", *arguments]
        environment = self.environment | {"RAY_ADDRESS": self.address}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False
        )
        return result.stdout + result.stderr

    def processes_of_actors(self) -> list[str]:
        return [command for command in processes_marked(self.mark).values() if "Actor" in command]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        for pid in processes_marked(self.mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def head() -> Iterator[Head]:
    folder = Path("/tmp") / f"antiphon-{secrets.token_hex(3)}"  # short: it holds unix sockets
    head = Head(folder)
    try:
        assert wait_until(lambda: answers(f"{head.address}/api/version"), 60)
        yield head
    finally:
        head.close()


def test_a_submitted_job_serves_and_stopping_it_drains_and_leaves_nothing(head: Head, tiny_model: Path):
    (port,) = free_ports(1)
    entrypoint = ["python", "deploy.py", "serve", "tiny-random", "--set", f"model.path={tiny_model}"]
    entrypoint += ["--set", f"ingress.port={port}", "--set", "cluster.address=auto"]
    submitted = head.job("submit", "--submission-id=smoke", "--no-wait", "--working-dir=.", "--", *entrypoint)
    assert "smoke" in submitted
    assert wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60), head.job("logs", "smoke")
    assert any("WorkerActor" in command for command in head.processes_of_actors())
    head.job("stop", "smoke")
    log = head.job("logs", "smoke")
    assert "draining" in log
    assert "stopped; nothing is left running" in log
    assert "cluster at " in log  # it joined this one, and started none of its own
    assert head.processes_of_actors() == []
