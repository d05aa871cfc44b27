"""What is asked of Ray beyond what it promises, and that without it a start is only slower."""

from __future__ import annotations

import signal
import subprocess
from types import SimpleNamespace

import pytest

from cluster import runtime
from cluster.deployment_errors import InterruptedStartError


class Node:
    def start_monitor(self) -> str:
        return "monitor"

    def start_api_server(self, *, include_dashboard: bool) -> str:
        return "dashboard"

    def start_log_monitor(self) -> str:
        return "logs"


def started(node: object) -> list[str | None]:
    return [node.start_monitor(), node.start_api_server(include_dashboard=False), node.start_log_monitor()]


def test_what_nobody_talks_to_is_left_out_of_a_start_and_ray_is_as_before_after_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime, "ray_node", SimpleNamespace(Node=Node))
    with runtime._without_bystanders(forward_logs=False):
        assert started(Node()) == [None, None, None]
    assert started(Node()) == ["monitor", "dashboard", "logs"]


def test_logs_that_are_asked_for_have_their_reader(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime, "ray_node", SimpleNamespace(Node=Node))
    with runtime._without_bystanders(forward_logs=True):
        assert started(Node()) == [None, None, "logs"]


def test_a_ray_with_other_names_for_them_starts_as_it_does(monkeypatch: pytest.MonkeyPatch):
    renamed = type("Node", (), {"launch_dashboard": lambda self: "dashboard"})
    monkeypatch.setattr(runtime, "ray_node", SimpleNamespace(Node=renamed))
    with runtime._without_bystanders(forward_logs=False):
        assert renamed().launch_dashboard() == "dashboard"
    assert not hasattr(renamed, "start_monitor")


def test_a_start_that_fails_without_them_is_tried_again_with_them(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def init(**_: object) -> None:
        seen.append(started(Node()))
        if seen[-1][1] is None:
            raise RuntimeError("there is no dashboard")

    monkeypatch.setattr(runtime, "ray_node", SimpleNamespace(Node=Node))
    monkeypatch.setattr(runtime.ray, "init", init)
    monkeypatch.setattr(runtime.ray, "shutdown", lambda: None)
    monkeypatch.setenv("PYTHONPATH", "")
    runtime.Runtime.connect("local", python_path="/project", forward_logs=True)
    assert seen == [[None, None, "logs"], ["monitor", "dashboard", "logs"]]


def test_a_start_that_a_signal_breaks_off_leaves_no_child_of_a_child(monkeypatch: pytest.MonkeyPatch):
    families: list[subprocess.Popen[bytes]] = []

    def init(**_: object) -> None:
        families.append(subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE))
        raise SystemExit(15)

    monkeypatch.setattr(runtime.ray, "init", init)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(InterruptedStartError):
        runtime.Runtime.connect("local", python_path="/project")
    families[0].communicate(timeout=10)  # ends when nobody holds the pipe any more
    assert families[0].returncode == -signal.SIGKILL
