"""Several systems on the same work, in the same run, in turn.

    python -m benchmarks.peers.compare --model MODEL_DIR --systems ours-fp32,vllm-fp32 --workloads W4,W2 --repeats 3

Each repeat starts every system once, in the order given (A B A B ...), times its start, runs the workloads against it
and stops it. Beside the figures: the machine's memory bandwidth and arithmetic just before, the memory of the whole
process tree, and how much of the CPU others used. All systems get the same requests; each repeat has its own, so that
no cache knows them. Writes everything to --json after each server; --resume adds to what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import serve
from benchmarks.completion_client import Dialect
from benchmarks.peers import antiphon, llama_cpp, transformers_serve, vllm
from benchmarks.peers.comparison import Record, report
from benchmarks.peers.conditions import Conditions
from benchmarks.peers.machine import CpuTimes, busy_cores, calibrate
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.system import Adapter, Setting, System, default_peers_directory
from benchmarks.serving_figures import Slo
from benchmarks.workloads import STANDARD, Workload, make_workload

PEERS: dict[str, Adapter] = {
    "ours": antiphon.system,
    "vllm": vllm.system,
    "llama": llama_cpp.system,
    "transformers": transformers_serve.system,
}


def make_system(name: str, setting: Setting, more: Sequence[str] = ()) -> System:
    """`ours-fp32`, `vllm-bf16`, ...; `more` is appended to its command. Raises: ValueError."""
    peer, _, variant = name.partition("-")
    if peer not in PEERS:
        raise ValueError(f"there is no system {peer!r}; give one of {', '.join(f'{p}-...' for p in PEERS)}")
    system = PEERS[peer](variant, setting)
    system.command.extend(more)
    return system


def measure(system: System, setting: Setting, seed: int, options: argparse.Namespace) -> Record:
    """One start of one system, and all workloads."""
    conditions = conditions_of(options)
    with conditions.applied(system) as changed:
        return _measure(changed, setting, seed, options) | conditions.recorded()


def _measure(system: System, setting: Setting, seed: int, options: argparse.Namespace) -> Record:
    record: Record = {"system": system.name, "version": system.version, "command": system.command, "seed": seed}
    calibration = calibrate(setting.num_threads)
    record["calibration"] = asdict(calibration) if calibration else None
    log = options.logs / f"{system.name}.log"
    try:
        with Server(system, setting.port, log, start_timeout_s=options.start_timeout) as server:
            record |= {"start_s": server.start_s, "num_processes": len(server.tree.processes())}
            record["start_pss_bytes"] = server.tree.pss_bytes()
            record["workloads"] = {}
            for number, workload in enumerate(workloads_of(options, seed, vocab_size(setting))):
                print(f"  {workload.name}", file=sys.stderr, flush=True)
                if number:
                    time.sleep(options.pause)
                with busy_cores(options.busy_cores):
                    found = run_workload(server, workload, setting, seed, options)
                record["workloads"].setdefault(workload.name, []).append(found)
    except ServerError as error:
        record["error"] = str(error)
        print(f"  {error}", file=sys.stderr, flush=True)
    return record


def run_workload(
    server: Server, workload: Workload, setting: Setting, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    system = server.system
    text = serve.text_prompts(system.tokenizer_file) if system.tokenizer_file else None
    dialect = Dialect(system.model_name, system.omitted, prompt_text=text)
    times, tree_s, own_s, started = CpuTimes.now(), server.tree.cpu_seconds(), time.process_time(), time.monotonic()
    work = serve.run(
        server.url,
        dialect,
        [workload],
        vocab_size=vocab_size(setting),
        seed=seed,
        rate=options.rate,
        slo=options.slo,
        timeout_s=options.timeout,
    )
    try:
        figures: dict[str, Any] = asyncio.run(_within(work, options.timeout))[0]
    except (RuntimeError, TimeoutError) as error:
        return {"errors": [str(error) or f"not finished in {options.timeout:g} s"]}
    own_s, tree_s = time.process_time() - own_s, server.tree.cpu_seconds() - tree_s
    after, core_seconds = CpuTimes.now(), (time.monotonic() - started) * (os.cpu_count() or 1)
    figures["others_cpu_share"] = max(0.0, after.busy - times.busy - tree_s - own_s) / core_seconds
    figures["stolen_cpu_share"] = (after.stolen - times.stolen) / core_seconds
    figures["server_cpu_share"] = tree_s / core_seconds
    figures["pss_bytes"] = server.tree.pss_bytes()
    return figures


async def _within(work: Any, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await work


def vocab_size(setting: Setting) -> int:
    return int(setting.model_config["vocab_size"])


def workloads_of(options: argparse.Namespace, seed: int, vocab: int) -> list[Workload]:
    """In the order given, `--runs-per-start` times, each time with other prompts."""
    return [
        make_workload(name, vocab_size=vocab, seed=1000 * run + seed, scale=options.scale)
        for run in range(options.runs_per_start)
        for name in options.workloads
    ]


def make_setting(options: argparse.Namespace) -> Setting:
    """Room for the largest of the workloads, and not more."""
    peers = options.peers.expanduser()
    draft = workloads_of(options, 0, 1000)
    return Setting(
        peers=peers,
        model=options.model.expanduser(),
        gguf=(options.gguf or peers / "gguf").expanduser(),
        num_threads=options.num_threads,
        max_num_seqs=options.max_num_seqs or max(workload.num_streams for workload in draft),
        max_model_len=options.max_model_len or -(-max(w.max_request_tokens for w in draft) // 256) * 256,
        kv_gib=options.kv_gib,
        port=options.port,
    )


def conditions_of(options: argparse.Namespace) -> Conditions:
    return Conditions(options.without_amx, options.cold, options.peers.expanduser().absolute())


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.peers.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", type=Path, help="Hugging Face directory, weights in float32 or bfloat16")
    made.add_argument("--systems", type=names, default=[], help="ours-fp32,vllm-fp32,ours-int8,llama-q8_0,...")
    made.add_argument("--workloads", type=names, default=["W4", "W2"], help=", ".join(STANDARD))
    made.add_argument("--repeats", type=int, default=3, help="starts of each system")
    made.add_argument("--runs-per-start", type=int, default=1, help="of the workloads, for servers slow to start")
    made.add_argument("--scale", type=float, default=1.0, help="shrinks the workloads, for a quick look")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--rate", type=float, help="open loop: requests per second")
    made.add_argument("--slo", type=Slo.parse, help="for goodput: ttft=1000,tpot=100")
    made.add_argument("--peers", type=Path, default=default_peers_directory(), help="where they are installed")
    made.add_argument("--gguf", type=Path, help="folder with Q8_0.gguf, F32.gguf, ...; default: PEERS/gguf")
    made.add_argument("--num-threads", type=int, default=os.cpu_count() or 1)
    made.add_argument("--max-num-seqs", type=int, help="default: what the workloads need")
    made.add_argument("--max-model-len", type=int, help="default: what the workloads need")
    made.add_argument("--kv-gib", type=float, default=2.0, help="KV cache of the systems that are told its size")
    made.add_argument("--without-amx", action="store_true", help="as on a CPU with AVX-512 and VNNI, and nothing newer")
    made.add_argument("--cold", action="store_true", help="each start finds nothing that was compiled before")
    made.add_argument("--busy-cores", type=int, default=0, help="neighbours that use a core each meanwhile")
    made.add_argument("--arguments", action="append", default=[], metavar="SYSTEM=WORDS", help="more for its command")
    made.add_argument("--port", type=int, default=8390)
    made.add_argument("--pause", type=float, default=1.0, help="seconds between two workloads")
    made.add_argument("--timeout", type=float, default=1200.0, help="seconds for one workload")
    made.add_argument("--start-timeout", type=float, default=900.0)
    made.add_argument("--json", type=Path, default=Path("build/peers.json"))
    made.add_argument("--logs", type=Path, default=Path("build/peers-logs"), help="folder for the servers' logs")
    made.add_argument("--resume", action="store_true", help="add to the records that --json already has")
    made.add_argument("--report", action="store_true", help="only print the tables of --json again")
    return made


def compare(options: argparse.Namespace, records: list[Record]) -> None:
    if options.model is None or not options.systems:
        raise ValueError("give --model and --systems")
    conditions_of(options).check(records)
    setting = make_setting(options)
    more = {name: words.split() for name, _, words in (text.partition("=") for text in options.arguments)}
    systems = [make_system(name, setting, more.pop(name, ())) for name in options.systems]
    if more:
        raise ValueError(f"--arguments names {next(iter(more))!r}, which is not among the systems")
    for system in systems:
        if missing := system.missing():
            raise ValueError(f"{system.name} needs {missing[0]}, which is not there; see benchmarks/peers/README.md")
    options.logs.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    first = options.seed + len({record["seed"] for record in records})
    for seed in range(first, first + options.repeats):
        for system in systems:
            print(f"{system.name}, requests of seed {seed}", file=sys.stderr, flush=True)
            records.append(measure(system, setting, seed, options))
            options.json.write_text(json.dumps(records, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    keeps = options.resume or options.report
    records: list[Record] = json.loads(options.json.read_text()) if keeps and options.json.exists() else []
    try:
        if not options.report:
            compare(options, records)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(report(records))
    return 1 if any(record_errors(record) for record in records) else 0


def record_errors(record: Record) -> bool:
    return "error" in record or any(run["errors"] for runs in record["workloads"].values() for run in runs)


if __name__ == "__main__":
    sys.exit(main())
