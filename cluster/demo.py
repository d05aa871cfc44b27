"""The demonstration: several questions at once over HTTP, answers as they stream in, then their times.

Owns the questions, the client and what is shown. It is a client like any other: it knows the deployment's URL alone.
"""

from __future__ import annotations

import http.client
import json
import queue
import textwrap
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.deployment_errors import InterruptedStartError, StartupError

if TYPE_CHECKING:
    from cluster.supervisor import Supervisor

QUESTIONS = (
    "What is gravity? Explain it in simple terms.",
    "Write a short story about a lighthouse keeper.",
    "Give me three tips for sleeping better.",
    "What is the capital of France, and what is it famous for?",
)
TIMEOUT_S = 120.0
POLL_S = 0.1
LINE_WIDTH = 96
PANEL_WIDTH = 100  # at most: longer lines are hard to read


@dataclass(slots=True)
class Stream:
    """One question and what has come back. Times are seconds since it was asked."""

    number: int
    question: str
    answer: str = ""
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    error: str | None = None
    is_cut: bool = False  # at the longest answer asked for
    is_done: bool = False
    shown: int = field(default=0, repr=False)  # characters already printed, where lines cannot be redrawn

    @property
    def tokens_per_s(self) -> float | None:
        """While decoding: the tokens after the first over the time they took."""
        if self.first_token_s is None or self.num_tokens < 2 or self.last_token_s <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.last_token_s - self.first_token_s)


@dataclass(frozen=True, slots=True)
class Client:
    """A minimal client of the chat endpoint."""

    url: str
    model: str
    api_key: str | None = None

    def ask(self, question: str, max_tokens: int) -> Iterator[dict[str, object]]:
        """The events of one streamed answer, as the server sends them."""
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"HTTP {response.status}: {response.read(2000).decode(errors='replace')}")
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
        finally:
            connection.close()


def ask_questions(supervisor: Supervisor, *, max_tokens: int, questions: Sequence[str] = QUESTIONS) -> None:
    """Ask all questions at once, show the answers as they come, then the times.

    Raises:
        StartupError: a question was not answered.
        EngineLostError: the deployment was lost.
        InterruptedStartError: the user stopped it.
    """
    deployment = supervisor.deployment
    client = Client(deployment.url, deployment.model_name, deployment.config.ingress.api_key)
    streams = [Stream(number, question) for number, question in enumerate(questions, start=1)]
    changed: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    started = time.monotonic()
    for stream in streams:
        threading.Thread(target=_follow, args=(client, stream, max_tokens, changed), daemon=True).start()
    console = Console()
    show = _show_live if console.is_terminal else _show_lines
    for _ in show(console, streams, changed):
        supervisor.check()
        if supervisor.stop.num_requests:
            raise InterruptedStartError("stopped before every question was answered")
    elapsed = time.monotonic() - started
    failed = [stream for stream in streams if stream.error]
    if failed:
        raise StartupError(f"question {failed[0].number} was not answered: {failed[0].error}")
    console.print()
    console.print(_times(streams, elapsed))


def _follow(client: Client, stream: Stream, max_tokens: int, changed: queue.SimpleQueue[Stream]) -> None:
    """Fill `stream` from the network, in a thread of its own."""
    started = time.monotonic()
    try:
        for event in client.ask(stream.question, max_tokens):
            _take_event(stream, event, time.monotonic() - started)
            changed.put(stream)
    except (OSError, http.client.HTTPException, ValueError) as error:
        stream.error = str(error) or type(error).__name__
    stream.is_done = True
    changed.put(stream)


def _take_event(stream: Stream, event: dict[str, object], now: float) -> None:
    if "error" in event:
        error = event["error"]
        raise OSError(error.get("message") if isinstance(error, dict) else str(error))
    usage = event.get("usage")
    if isinstance(usage, dict):
        stream.num_tokens = int(usage["completion_tokens"])
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        stream.is_cut = stream.is_cut or choices[0].get("finish_reason") == "length"
        text = choices[0].get("delta", {}).get("content") or ""
        if text:
            stream.answer += text
            stream.last_token_s = now
            if stream.first_token_s is None:
                stream.first_token_s = now


def _next_change(changed: queue.SimpleQueue[Stream]) -> Stream | None:
    try:
        return changed.get(timeout=POLL_S)
    except queue.Empty:
        return None


def _show_live(console: Console, streams: Sequence[Stream], changed: queue.SimpleQueue[Stream]) -> Iterator[None]:
    """Panels that fill, on a terminal: their last lines while they grow, and all of them at the end."""
    with Live(console=console, refresh_per_second=10, transient=True, vertical_overflow="crop") as live:
        while not all(stream.is_done for stream in streams):
            if _next_change(changed):
                live.update(_panels(console, streams, console.height - 1))
            yield
    console.print(_panels(console, streams, None))


def _panels(console: Console, streams: Sequence[Stream], height: int | None) -> Group:
    """One panel per question. What does not fit into `height` is missing at the top of the longest answers."""
    width = min(console.width, PANEL_WIDTH)
    texts = [Text(stream.answer.strip()) for stream in streams]
    for stream, text in zip(streams, texts, strict=True):
        if stream.is_cut:
            text.append(" ...", style="dim")
    lines = [text.wrap(console, width - 4) for text in texts]  # a panel's border and padding take 4 columns, 2 rows
    while height is not None and sum(map(len, lines)) > max(height - 2 * len(lines), len(lines)):
        max(lines, key=len).pop(0)
    return Group(
        *(
            Panel(
                Text("\n").join(shown),
                title=Text(f"[{stream.number}] {stream.question}", style="bold"),
                title_align="left",
                border_style="green" if stream.is_done else "dim",
                width=width,
            )
            for stream, shown in zip(streams, lines, strict=True)
        )
    )


def _show_lines(console: Console, streams: Sequence[Stream], changed: queue.SimpleQueue[Stream]) -> Iterator[None]:
    """Whole lines, each with its question's number, where the output is no terminal."""
    for stream in streams:
        console.print(f"[{stream.number}] {stream.question}", style="bold", markup=False, highlight=False)
    console.print()
    while not all(stream.is_done for stream in streams):
        if (latest := _next_change(changed)) is not None:
            _print_whole_lines(console, latest)
        yield
    for stream in streams:
        _print_whole_lines(console, stream)


def _print_whole_lines(console: Console, stream: Stream) -> None:
    """What is complete of the answer and not printed yet: up to a line break, or a line's width."""
    while rest := stream.answer[stream.shown :]:
        line, broken, _ = rest.partition("\n")
        if len(line) > LINE_WIDTH:
            line = textwrap.wrap(line, LINE_WIDTH, drop_whitespace=False)[0]
            stream.shown += len(line)
        elif broken or stream.is_done:
            stream.shown += len(line) + len(broken)
        else:
            return
        if line.strip():
            cut = " ..." if stream.is_cut and stream.is_done and stream.shown == len(stream.answer) else ""
            console.print(f"[{stream.number}] {line.strip()}{cut}", markup=False, highlight=False, soft_wrap=True)


def _times(streams: Sequence[Stream], elapsed: float) -> Table:
    title = f"{len(streams)} answers at once, {elapsed:.1f} s"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="", box=box.ROUNDED)
    table.add_column("question")
    for name in ("tokens", "time to first token", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for stream in streams:
        first = "-" if stream.first_token_s is None else f"{stream.first_token_s * 1000:.0f} ms"
        rate = "-" if stream.tokens_per_s is None else f"{stream.tokens_per_s:.1f}"
        question = textwrap.shorten(f"[{stream.number}] {stream.question}", 34, placeholder=" ...")  # fits 80 columns
        table.add_row(Text(question), str(stream.num_tokens), first, rate)
    total = sum(stream.num_tokens for stream in streams)
    slowest = max((stream.first_token_s or 0.0) for stream in streams)
    table.add_section()
    table.add_row(
        "all together", str(total), f"{slowest * 1000:.0f} ms at most", f"{total / elapsed:.1f}", style="bold"
    )
    return table
