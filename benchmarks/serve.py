"""Latency and throughput of any OpenAI-style server under the standard workloads, over streaming HTTP.

    python -m benchmarks.serve --url http://127.0.0.1:8000 --model NAME --workloads W4,W2
    python -m benchmarks.serve ... --workloads W2 --rate 4 --slo ttft=1000,tpot=100      # open loop, Poisson arrivals
    python -m benchmarks.serve ... --input-len 100-500 --output-len 64 --num-requests 100 --num-streams 16

Owns the load: closed loop (each stream sends its next request when the last one is answered) or open loop (requests are
sent when they are due, however slow the server is). Prompts are random token ids, decoding is greedy without end of
sequence. Exits with 1 if any request failed or did not get exactly the tokens that it asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.completion_client import Answer, CompletionClient, Dialect
from benchmarks.report import heading, markdown_table
from benchmarks.serving_figures import Slo, summarize
from benchmarks.workloads import (
    MEANINGS,
    STANDARD,
    CompletionRequest,
    Shape,
    Workload,
    arrival_times,
    draw,
    make_workload,
)

Figures = dict[str, Any]

COLUMNS = {
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "stream_tokens_per_s": "one stream, tok/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "p99",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "p99",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "p99",
    "tokens_per_chunk": "tokens per chunk",
    "good_share": "good",
    "good_output_tokens_per_s": "good tok/s",
}


async def closed_loop(
    client: CompletionClient, requests: Sequence[CompletionRequest], num_streams: int
) -> list[Answer]:
    """Answers in the order in which they were complete."""
    waiting = iter(requests)
    answers: list[Answer] = []

    async def stream() -> None:
        for request in waiting:
            answers.append(await client.complete(request))

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return answers


async def open_loop(client: CompletionClient, requests: Sequence[CompletionRequest], dues: list[float]) -> list[Answer]:
    """Request i is sent `dues[i]` seconds from now."""
    start = time.perf_counter()

    async def one(request: CompletionRequest, due: float) -> Answer:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        return await client.complete(request, start + due)

    return await asyncio.gather(*(one(request, due) for request, due in zip(requests, dues, strict=True)))


async def measure(
    client: CompletionClient,
    workload: Workload,
    *,
    rate: float | None = None,
    seed: int = 0,
    slo: Slo | None = None,
) -> Figures:
    """One workload's figures. With `rate`, its requests arrive in an open loop of so many per second."""
    cold = [await client.complete(request) for request in workload.cold]
    cpu, started = time.process_time(), time.perf_counter()
    if rate is None:
        answers = await closed_loop(client, workload.requests, workload.num_streams)
    else:
        answers = await open_loop(client, workload.requests, arrival_times(len(workload.requests), rate, seed))
    wall_s = time.perf_counter() - started
    loop = {"num_streams": workload.num_streams} if rate is None else {"rate": rate}
    figures: Figures = {"workload": workload.name, "seed": seed, **loop, **summarize(answers, wall_s, slo)}
    figures["client_cpu_share"] = (time.process_time() - cpu) / wall_s
    if workload.cold:
        figures["cold_ttft_ms"] = 1e3 * cold[0].ttft if cold[0].chunk_times else None
    figures["errors"] = sorted({answer.error for answer in (*cold, *answers) if answer.error is not None})
    return figures


async def warm_up(client: CompletionClient, vocab_size: int, seed: int) -> None:
    """Two short requests: what a server does only once is not measured. Raises: RuntimeError, if one fails."""
    shape = Shape(2, 1, (64, 64), (16, 16))
    for answer in await closed_loop(client, draw("warm-up", shape, vocab_size=vocab_size, seed=seed).requests, 1):
        if answer.error is not None:
            raise RuntimeError(f"the server does not answer as it should: {answer.error}")


async def run(
    url: str,
    dialect: Dialect,
    workloads: Sequence[Workload],
    *,
    vocab_size: int,
    seed: int = 0,
    rate: float | None = None,
    slo: Slo | None = None,
    timeout_s: float = 1800.0,
    on_figures: Callable[[Figures], None] = lambda figures: None,
) -> list[Figures]:
    async with CompletionClient(url, dialect, timeout_s=timeout_s) as client:
        await warm_up(client, vocab_size, seed)
        found = []
        for workload in workloads:
            found.append(await measure(client, workload, rate=rate, seed=seed, slo=slo))
            on_figures(found[-1])
        return found


def table(found: Sequence[Figures]) -> str:
    """One row for each workload; columns that nobody has are left out."""
    columns = [key for key in COLUMNS if any(figures.get(key) is not None for figures in found)]
    has_cold = any("cold_ttft_ms" in figures for figures in found)
    rows = []
    for figures in found:
        served = f"{figures['num_requests'] - figures['num_failed']} of {figures['num_requests']}"
        cells = [figures["workload"], served, *(_cell(figures.get(key)) for key in columns)]
        rows.append([*cells, _cell(figures.get("cold_ttft_ms"))] if has_cold else cells)
    names = ["workload", "served", *(COLUMNS[key] for key in columns), *(["cold TTFT, ms"] if has_cold else [])]
    return markdown_table(names, rows)


def _cell(value: object) -> object:
    return "" if value is None else value


def text_prompts(tokenizer_file: Path) -> Callable[[tuple[int, ...]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)


def served_model(url: str) -> str:
    """The first model that the server lists."""
    with urllib.request.urlopen(url.rstrip("/") + "/v1/models", timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


def length_range(text: str) -> tuple[int, int]:
    """`128` or `100-512`."""
    least, _, most = text.partition("-")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no length; give 128 or 100-512")
    return found


def chosen_workloads(options: argparse.Namespace) -> list[Workload]:
    if options.input_len is not None or options.output_len is not None:
        shape = Shape(
            options.num_requests or 64,
            options.num_streams or 8,
            options.input_len or (256, 256),
            options.output_len or (128, 128),
            num_shared=options.shared_len,
        )
        return [draw("own", shape.scaled(options.scale), vocab_size=options.vocab_size, seed=options.seed)]
    names = [name.strip() for name in options.workloads.split(",")]
    found = [make_workload(n, vocab_size=options.vocab_size, seed=options.seed, scale=options.scale) for n in names]
    if options.num_streams is not None:
        found = [replace(workload, num_streams=options.num_streams) for workload in found]
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--url", default="http://127.0.0.1:8000")
    made.add_argument("--model", help="default: the first that the server lists")
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
    made.add_argument("--workloads", default="W4,W2,W3,W3S,W1", help=meanings)
    made.add_argument("--scale", type=float, default=1.0, help="shrinks counts and lengths, for a quick look")
    made.add_argument("--seed", type=int, default=0, help="another one for another run, or its prompts are cached")
    made.add_argument("--vocab-size", type=int, default=49152)
    made.add_argument("--rate", type=float, help="open loop: requests per second, Poisson")
    made.add_argument("--slo", type=Slo.parse, help="for goodput, in ms: ttft=1000,tpot=100,latency=20000")
    made.add_argument("--input-len", type=length_range, help="an own workload instead: 256 or 100-512")
    made.add_argument("--output-len", type=length_range)
    made.add_argument("--shared-len", type=int, default=0, help="tokens that its prompts begin with in common")
    made.add_argument("--num-requests", type=int)
    made.add_argument("--num-streams", type=int)
    made.add_argument("--omit", action="append", default=[], metavar="FIELD", help="a body field the server refuses")
    made.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="more body fields")
    made.add_argument("--text-prompts", type=Path, metavar="TOKENIZER.JSON", help="for servers without token ids")
    made.add_argument("--api-key")
    made.add_argument("--timeout", type=float, default=1800.0, help="seconds for one request")
    made.add_argument("--json", type=Path, help="write the figures here, too")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    unknown = [name for name in options.workloads.split(",") if name.strip() not in STANDARD]
    if unknown:
        raise SystemExit(f"there is no workload {unknown[0]!r}; give one of {', '.join(STANDARD)}")
    dialect = Dialect(
        options.model or served_model(options.url),
        frozenset(options.omit),
        options.extra,
        text_prompts(options.text_prompts) if options.text_prompts else None,
        {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
    )
    found = asyncio.run(
        run(
            options.url,
            dialect,
            chosen_workloads(options),
            vocab_size=options.vocab_size,
            seed=options.seed,
            rate=options.rate,
            slo=options.slo,
            timeout_s=options.timeout,
            on_figures=lambda figures: print(f"{figures['workload']}: {figures['wall_s']:.1f} s", file=sys.stderr),
        )
    )
    print(heading(("aiohttp",)))
    print(table(found))
    errors = [f"{figures['workload']}: {error}" for figures in found for error in figures["errors"]]
    print("\n".join(errors) or "Every request got exactly the tokens that it asked for.")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
