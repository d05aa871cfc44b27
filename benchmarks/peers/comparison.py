"""The records of a comparison as tables: medians over the repeats, and ratios of what was measured in the same repeat.

Owns what is compared and how. Starts nothing, reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.peers.conditions import said
from benchmarks.report import heading, markdown_table

Record = dict[str, Any]
Runs = dict[tuple[int, int], Record]  # by seed, and number within the start

MIB = 2**20
OURS = "ours-"
# name of a figure -> its column; True: more is better
FIGURES: dict[str, tuple[str, bool]] = {
    "output_tokens_per_s": ("output tok/s", True),
    "total_tokens_per_s": ("total tok/s", True),
    "stream_tokens_per_s": ("one stream, tok/s", True),
    "cold_ttft_ms": ("cold TTFT, ms", False),
    "ttft_p50_ms": ("TTFT p50, ms", False),
    "ttft_p99_ms": ("TTFT p99, ms", False),
    "tpot_p50_ms": ("TPOT p50, ms", False),
    "itl_p50_ms": ("ITL p50, ms", False),
    "itl_p99_ms": ("ITL p99, ms", False),
    "good_share": ("good", True),
    "good_output_tokens_per_s": ("good tok/s", True),
}
CIRCUMSTANCES = {
    "tokens_per_chunk": "tokens per chunk",
    "server_cpu_share": "server's CPU",
    "others_cpu_share": "others' CPU",
    "stolen_cpu_share": "stolen CPU",
    "client_cpu_share": "client, cores",
}


def report(records: Sequence[Record]) -> str:
    systems = list(dict.fromkeys(record["system"] for record in records))
    workloads = list(dict.fromkeys(name for record in records for name in record.get("workloads", {})))
    parts = [heading(("psutil", "aiohttp")), _machine(records), *said(records), _starts(records, systems)]
    parts += [f"{name}\n\n{_workload(records, systems, name)}" for name in workloads]
    pairs = list(pairs_of(systems))
    if pairs:
        parts.append(
            f"How many times better, medians of the repeats (least-most):\n\n{_ratios(records, pairs, workloads)}"
        )
    parts += _complaints(records)
    return "\n".join(parts)


def pairs_of(systems: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Ours against every peer; without any of ours, the first against the others."""
    ours = [name for name in systems if name.startswith(OURS)]
    peers = [name for name in systems if not name.startswith(OURS)]
    if not ours or not peers:
        ours, peers = list(systems[:1]), list(systems[1:])
    return ((own, peer) for peer in peers for own in ours)


def _machine(records: Sequence[Record]) -> str:
    found = [record["calibration"] for record in records if record.get("calibration")]
    if not found:
        return "No C compiler, so the machine was not calibrated.\n"
    bandwidth = [calibration["read_gb_per_s"] for calibration in found]
    flops = [calibration["fp32_gflop_per_s"] for calibration in found]
    return (
        f"The machine before each start, all threads: {_spread(bandwidth)} GB/s read from memory, "
        f"{_spread(flops)} GFLOP/s fp32 multiply-add, medians of {len(found)}.\n"
    )


def _starts(records: Sequence[Record], systems: Sequence[str]) -> str:
    rows = []
    for system in systems:
        mine = [record for record in records if record["system"] == system]
        up = [record for record in mine if "start_s" in record]
        peaks = [run["pss_bytes"] for record in up for runs in record["workloads"].values() for run in _good(runs)]
        rows.append((
            system,
            mine[0]["version"],
            f"{len(up)} of {len(mine)}",
            _spread([record["start_s"] for record in up]),
            _spread([record["start_pss_bytes"] / MIB for record in up]),
            f"{max(peaks) / MIB:,.0f}" if peaks else "",
            up[0]["num_processes"] if up else "",
        ))  # fmt: skip
    columns = (
        "system",
        "version",
        "started",
        "to healthy, s",
        "PSS then, MiB",
        "PSS later, most",
        "processes",
    )
    return markdown_table(columns, rows)


def _good(runs: Iterable[Record]) -> Iterator[Record]:
    """Runs that were finished; single requests may have failed."""
    return (run for run in runs if "wall_s" in run)


def runs_of(records: Sequence[Record], system: str, workload: str) -> Runs:
    """What ran under the same key ran the same requests."""
    return {
        (record["seed"], number): run
        for record in records
        if record["system"] == system
        for number, run in enumerate(record.get("workloads", {}).get(workload, ()))
        if "wall_s" in run
    }


def _workload(records: Sequence[Record], systems: Sequence[str], workload: str) -> str:
    found = {system: list(runs_of(records, system, workload).values()) for system in systems}
    known = [run for runs in found.values() for run in runs]
    columns = [key for key in (*FIGURES, *CIRCUMSTANCES) if any(run.get(key) is not None for run in known)]
    rows = []
    for system, runs in found.items():
        served = sum(run["num_requests"] - run["num_failed"] for run in runs)
        asked = sum(run["num_requests"] for run in runs)
        first = columns[0] if columns else ""
        spread = _range([run[first] for run in runs if run.get(first) is not None])
        rows.append((system, f"{served} of {asked}", *(_median_of(runs, key) for key in columns), spread))
    names = [FIGURES[key][0] if key in FIGURES else CIRCUMSTANCES[key] for key in columns]
    return markdown_table(("system", "served", *names, "output tok/s, least-most"), rows)


def _median_of(runs: Sequence[Record], key: str) -> object:
    values = [run[key] for run in runs if run.get(key) is not None]
    return float(median(values)) if values else ""


def _ratios(records: Sequence[Record], pairs: Sequence[tuple[str, str]], workloads: Sequence[str]) -> str:
    rows: list[tuple[object, ...]] = []
    for own, peer in pairs:
        for workload in workloads:
            own_runs, peer_runs = runs_of(records, own, workload), runs_of(records, peer, workload)
            cells = [_spread(ratios_of(own_runs, peer_runs, key)) for key in FIGURES]
            if any(cells):
                rows.append((f"{own} / {peer}", workload, *cells))
        rows.append((f"{own} / {peer}", "start", _start_ratio(records, own, peer), *[""] * (len(FIGURES) - 1)))
    used = [i for i in range(2 + len(FIGURES)) if i < 2 or any(row[i] for row in rows)]
    names = ["pair", "workload", *(column for column, _ in FIGURES.values())]
    return markdown_table([names[i] for i in used], [[row[i] for i in used] for row in rows])


def ratios_of(own_runs: Runs, peer_runs: Runs, key: str) -> list[float]:
    """How many times better the first is in `key`, for each pair of runs that ran the same requests."""
    more_is_better = FIGURES[key][1]
    together = [(own_runs[which].get(key), peer_runs[which].get(key)) for which in own_runs if which in peer_runs]
    return [(own / peer if more_is_better else peer / own) for own, peer in together if own and peer]


def _start_ratio(records: Sequence[Record], own: str, peer: str) -> str:
    def of(key: str) -> str:
        values = [[r[key] for r in records if r["system"] == name and key in r] for name in (own, peer)]
        return f"{median(values[1]) / median(values[0]):.2f}" if all(values) else "?"

    return f"time {of('start_s')}, memory {of('start_pss_bytes')}"


def _spread(values: Sequence[float]) -> str:
    """The median, and the range where there is one."""
    if not values:
        return ""
    return _short(median(values)) + (f" ({_range(values)})" if len(values) > 1 else "")


def _range(values: Sequence[float]) -> str:
    return f"{_short(min(values))}-{_short(max(values))}" if values else ""


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _complaints(records: Sequence[Record]) -> list[str]:
    said: list[str] = []
    for record in records:
        name = f"{record['system']}, seed {record['seed']}"
        if "error" in record:
            said.append(f"{name}: {record['error']}")
        for workload, runs in record.get("workloads", {}).items():
            said += [f"{name}, {workload}: {error}" for run in runs for error in run["errors"]]
    return said or ["Every request of every system got exactly the tokens that it asked for."]
