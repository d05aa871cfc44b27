"""Production traces as requests with synthetic tokens.

Two formats are known by their first line: Mooncake's JSON lines (prefix blocks of 512 tokens by id) and Azure's CSV
(lengths only). Tokens carry no meaning here, only identity: block `id` is 512 times one token of its own, so prompts
share exactly the prefixes that the trace says, and what a request generates is a token that no other request uses.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TRACE_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line. `block_ids` name its prompt's blocks of 512 tokens, the last one perhaps in part."""

    arrival_s: float
    num_prompt_tokens: int
    num_completion_tokens: int
    block_ids: tuple[int, ...]

    def token_ids(self) -> list[int]:
        tokens: list[int] = []
        for block_id in self.block_ids:
            tokens += [block_id] * TRACE_BLOCK_SIZE
        return tokens[: self.num_prompt_tokens]


def read_trace(path: Path, num_requests: int | None = None) -> list[TracedRequest]:
    """The requests of a trace in order of arrival, the first one at 0 s.

    Raises:
        ValueError: the file is in neither of the known formats.
    """
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    if first.startswith("{"):
        requests = _read_mooncake(path)
    elif first.startswith("TIMESTAMP,"):
        requests = _read_azure(path)
    else:
        raise ValueError(f"{path.name} is neither Mooncake JSON lines nor an Azure CSV; it starts with {first[:40]!r}")
    return sorted(requests, key=lambda r: r.arrival_s)[:num_requests]


def _read_mooncake(path: Path) -> list[TracedRequest]:
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        entry = json.loads(line)
        length, ids = max(1, entry["input_length"]), tuple(entry["hash_ids"])
        if len(ids) * TRACE_BLOCK_SIZE < length:
            raise ValueError(f"{path.name}, line {number}: {len(ids)} blocks do not hold {length} tokens")
        requests.append(TracedRequest(entry["timestamp"] / 1000, length, max(1, entry["output_length"]), ids))
    return requests


def _read_azure(path: Path) -> list[TracedRequest]:
    """No prompt shares anything: blocks are numbered through."""
    requests = []
    next_id = 0
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [(_seconds(row["TIMESTAMP"]), row) for row in csv.DictReader(lines)]
    start = min(arrival for arrival, _ in rows)
    for arrival, row in rows:
        length = max(1, int(row["ContextTokens"]))
        num_ids = -(-length // TRACE_BLOCK_SIZE)
        ids = tuple(range(next_id, next_id + num_ids))
        next_id += num_ids
        requests.append(TracedRequest(arrival - start, length, max(1, int(row["GeneratedTokens"])), ids))
    return requests


def _seconds(timestamp: str) -> float:
    whole, _, fraction = timestamp.partition(".")
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")


def best_hit_rate(requests: list[TracedRequest], block_size: int) -> float:
    """Share of prompt tokens that one cache that never forgets could serve, in whole blocks of `block_size`."""
    seen: set[int] = set()
    num_hit = 0
    for request in requests:
        num_known = next((i for i, b in enumerate(request.block_ids) if b not in seen), len(request.block_ids))
        num_tokens = min(num_known * TRACE_BLOCK_SIZE, request.num_prompt_tokens - 1)
        num_hit += num_tokens // block_size * block_size
        seen.update(request.block_ids)
    return num_hit / sum(r.num_prompt_tokens for r in requests)
