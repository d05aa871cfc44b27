"""Memory of a deployment by process, idle and under a small load.

    python benchmarks/footprint.py smollm2-135m-cpu [--set a.b=c ...] [--num-streams 8] [--max-tokens 64]

Prints a markdown table of PSS (a page that several processes share is split among them). Fails if a process that has no
business with tensors has loaded torch.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "ANTIPHON_FOOTPRINT"
START_TIMEOUT_S = 300.0
SAMPLE_S = 0.2
MIB = 2**20
ROLES = {
    "ray::WorkerActor": "rank",
    "ray::SchedulerActor": "scheduler",
    "ray::IngressActor": "ingress",
    "deploy.py": "driver",
}
WITHOUT_TORCH = ("scheduler", "ingress", "driver")


@dataclass
class Usage:
    """Bytes of one process."""

    role: str
    idle: int = 0
    peak: int = 0
    has_torch: bool = False


class Sampler:
    """PSS of every process that carries the mark, sampled until told to stop."""

    def __init__(self, mark: str) -> None:
        self.needle = f"{MARK}={mark}".encode()
        self.usage: dict[int, Usage] = {}

    def pids(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._is_ours(entry)]

    def _is_ours(self, entry: Path) -> bool:
        try:
            return self.needle in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def sample(self, *, idle: bool) -> None:
        for pid in self.pids():
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                has_torch = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue  # it has just left
            found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
            pss = int(found[1]) * 1024 if found else 0
            usage = self.usage.setdefault(pid, Usage(_role_of(command)))
            usage.idle = pss if idle else usage.idle
            usage.peak = max(usage.peak, pss)
            usage.has_torch = usage.has_torch or has_torch


def _role_of(command: str) -> str:
    return next((role for pattern, role in ROLES.items() if pattern in command), "Ray's own")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    parser.add_argument("--num-streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    mark = secrets.token_hex(8)
    command = [sys.executable, str(ROOT / "deploy.py"), "serve", options.config, "--set", "ingress.port=0"]
    for override in options.overrides:
        command += ["--set", override]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {MARK: mark})
        try:
            port = _wait_until_serving(process, Path(f"/proc/self/fd/{log.fileno()}"))
            sampler = Sampler(mark)
            time.sleep(2.0)
            sampler.sample(idle=True)
            _load(port, sampler, options.num_streams, options.max_tokens)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    _print_table(sampler, options)
    intruders = sorted({usage.role for usage in sampler.usage.values() if usage.has_torch} & set(WITHOUT_TORCH))
    if intruders:
        print(f"\ntorch is loaded where it has no business: {', '.join(intruders)}", file=sys.stderr)
        return 1
    print("\nNeither driver nor scheduler nor ingress has loaded torch.")
    return 0


def _wait_until_serving(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        output = log.read_text(errors="replace")
        if found := re.search(r"serving .* at http://[^:]+:(\d+)/v1", output):
            return int(found[1])
        if process.poll() is not None:
            raise SystemExit(output)
        time.sleep(0.2)
    raise SystemExit(f"not up after {START_TIMEOUT_S:g} s:\n{output}")


def _load(port: int, sampler: Sampler, num_streams: int, max_tokens: int) -> None:
    threads = [
        threading.Thread(target=_ask, args=(port, f"Tell me the story of number {number}.", max_tokens))
        for number in range(num_streams)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sampler.sample(idle=False)
        time.sleep(SAMPLE_S)


def _ask(port: int, prompt: str, max_tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    connection.close()


def _print_table(sampler: Sampler, options: argparse.Namespace) -> None:
    print(f"{options.config}, {options.num_streams} streams of {options.max_tokens} tokens; MiB of PSS\n")
    print("| role | processes | idle | peak | torch |\n|---|---|---|---|---|")
    usages = list(sampler.usage.values())
    for role in (*dict.fromkeys(ROLES.values()), "Ray's own"):
        mine = [usage for usage in usages if usage.role == role]
        idle, peak = sum(usage.idle for usage in mine), sum(usage.peak for usage in mine)
        torch = "yes" if any(usage.has_torch for usage in mine) else "no"
        print(f"| {role} | {len(mine)} | {idle / MIB:.0f} | {peak / MIB:.0f} | {torch} |")
    idle, peak = sum(usage.idle for usage in usages), sum(usage.peak for usage in usages)
    print(f"| all | {len(usages)} | {idle / MIB:.0f} | {peak / MIB:.0f} | |")


if __name__ == "__main__":
    sys.exit(main())
