"""Answering without HTTP: a batch of prompts, or a conversation at the terminal.

Owns reading prompts, progress and output. The engine is reached through a `Frontend` in this process, over the same
sockets as the ingress uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.errors import RequestError
from cluster.exit_codes import DeploymentError, EngineLostError, InterruptedStartError, UsageError
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.frontend import Frontend
    from cluster.supervisor import Supervisor

WATCH_S = 0.2
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to be continued: plain text, or a conversation."""

    index: int
    text: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def summary(self) -> str:
        return self.text if self.text is not None else str(self.messages[-1].get("content", ""))


@dataclass(slots=True)
class Answer:
    prompt: Prompt
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def as_json(self) -> str:
        source = {"messages": self.prompt.messages} if self.prompt.text is None else {"prompt": self.prompt.text}
        result: dict[str, Any] = {"text": self.text, "num_tokens": self.num_tokens, "finish_reason": self.finish_reason}
        if self.error:
            result = {"error": self.error}
        return json.dumps({"index": self.prompt.index, **source, **result}, ensure_ascii=False)


def read_prompts(given: Iterable[str], file: Path | None, *, as_chat: bool) -> list[Prompt]:
    """The prompts of the command line, then those of `file`.

    Raises:
        UsageError: there are none, or the file cannot be read; the message names the line.
    """
    entries: list[str | list[Message]] = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                entries.append(_parse_entry(line, f"{file}:{number}") if file.suffix == ".jsonl" else line)
    if not entries:
        raise UsageError("there is nothing to answer; give --prompt TEXT or --file FILE")
    prompts = []
    for index, entry in enumerate(entries):
        if isinstance(entry, list):
            prompts.append(Prompt(index, messages=tuple(entry)))
        elif as_chat:
            prompts.append(Prompt(index, messages=({"role": "user", "content": entry},)))
        else:
            prompts.append(Prompt(index, text=entry))
    return prompts


def _parse_entry(line: str, place: str) -> str | list[Message]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not JSON ({error}); give one object per line") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("prompt"), str):
            return str(entry["prompt"])
        messages = entry.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return messages
    raise UsageError(f'{place}: give an object with "prompt" (text) or "messages" (a list of role and content)')


@asynccontextmanager
async def connected(supervisor: Supervisor) -> AsyncIterator[Frontend]:
    """A frontend in this process, joined to the deployment's schedulers."""
    from cluster.frontend import Frontend
    from cluster.text.processor import TextProcessor

    deployment = supervisor.deployment
    text = TextProcessor.from_directory(deployment.model_directory)
    frontend = Frontend(
        deployment.addresses,
        token=deployment.token,
        text=text,
        name="command line",
        seed=deployment.config.model.seed,
    )
    async with frontend:
        yield frontend


async def _watch(supervisor: Supervisor) -> None:
    """Ends with an error when the deployment is lost or the user asks to stop."""
    while True:
        supervisor.check()
        if supervisor.stop.num_requests:
            raise InterruptedStartError("stopped before everything was answered")
        await asyncio.sleep(WATCH_S)


def generate_batch(
    supervisor: Supervisor, prompts: Sequence[Prompt], params: SamplingParams, *, output: Path | None, console: Console
) -> None:
    """Answer every prompt. One is streamed to standard output; several are shown as they finish.

    Raises:
        DeploymentError: the deployment was lost, the user stopped it, or prompts were refused.
    """
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(output.open("w", encoding="utf-8")) if output else None
        asyncio.run(_generate_all(supervisor, prompts, params, sink, console))


async def _generate_all(
    supervisor: Supervisor, prompts: Sequence[Prompt], params: SamplingParams, sink: IO[str] | None, console: Console
) -> None:
    config = supervisor.deployment.config
    gate = asyncio.Semaphore(2 * config.scheduler.max_num_seqs * config.parallel.num_replicas)
    show_live = len(prompts) == 1 and sink is None
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    async with connected(supervisor) as frontend:
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=show_live) as progress:
            task = progress.add_task("answers", total=len(prompts), tokens=0)
            num_tokens = 0

            async def answer(prompt: Prompt) -> Answer:
                nonlocal num_tokens
                async with gate:
                    result = Answer(prompt)
                    try:
                        async for text, num_new in _deltas(frontend, prompt, params, result):
                            num_tokens += num_new
                            progress.update(task, tokens=num_tokens)
                            if show_live:
                                sys.stdout.write(text)
                                sys.stdout.flush()
                    except RequestError as error:
                        result.error = str(error)
                progress.advance(task)
                _publish(result, sink, progress.console, show_live)
                return result

            answers = await _all_or_lost(supervisor, [answer(prompt) for prompt in prompts])
    failed = [answer for answer in answers if answer.error]
    if failed:
        raise UsageError(f"{len(failed)} of {len(answers)} prompts were not answered; the first: {failed[0].error}")


async def _deltas(
    frontend: Frontend, prompt: Prompt, params: SamplingParams, answer: Answer
) -> AsyncIterator[tuple[str, int]]:
    if prompt.text is not None:
        source = frontend.generate(prompt.text, params)
    else:
        source = frontend.chat(prompt.messages, params)
    async for delta in source:
        answer.text += delta.text
        answer.num_tokens += len(delta.token_ids)
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        yield delta.text, len(delta.token_ids)


def _publish(answer: Answer, sink: IO[str] | None, console: Console, was_shown: bool) -> None:
    if sink is not None:
        sink.write(answer.as_json() + "\n")
        sink.flush()
    elif was_shown:
        print(flush=True)
    elif answer.error is None:
        print(f"[{answer.prompt.index}] {answer.prompt.summary}\n{answer.text.strip()}\n", flush=True)


async def _all_or_lost(supervisor: Supervisor, work: Sequence[Any]) -> list[Any]:
    """The results of `work`, unless the deployment is lost before."""
    watching: asyncio.Future[Any] = asyncio.ensure_future(_watch(supervisor))
    working: asyncio.Future[Any] = asyncio.gather(*work)
    try:
        await asyncio.wait([watching, working], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not watching.done():
            return list(working.result())
        working.cancel()
        await watching
        raise AssertionError("watching ends only with an error")
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, DeploymentError):
            await watching


def converse(supervisor: Supervisor, params: SamplingParams, *, system: str | None) -> None:
    """Talk until the input ends. Ctrl-C stops an answer; at the prompt it ends the conversation."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # waiting for a line is not a loop that looks at a flag
    console = Console()
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    console.print("Say something; an empty line ends the conversation.", style="dim")
    with asyncio.Runner() as runner:
        frontend_context = connected(supervisor)
        frontend = runner.run(frontend_context.__aenter__())
        try:
            while line := _ask(console):
                messages.append({"role": "user", "content": line})
                reply = runner.run(_reply(supervisor, frontend, messages, params, console))
                messages.append({"role": "assistant", "content": reply})
        finally:
            runner.run(frontend_context.__aexit__(None, None, None))


def _ask(console: Console) -> str:
    try:
        return console.input("[bold green]you>[/bold green] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


async def _reply(
    supervisor: Supervisor, frontend: Frontend, messages: list[Message], params: SamplingParams, console: Console
) -> str:
    """Stream one answer; what was said so far if it is interrupted."""
    supervisor.check()
    answer = Answer(Prompt(0, messages=tuple(messages)))
    console.print("[bold cyan]model>[/bold cyan] ", end="")
    try:
        async for text, _ in _deltas(frontend, answer.prompt, params, answer):
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    except RequestError as error:
        supervisor.check()
        raise EngineLostError(str(error)) from error
    except asyncio.CancelledError:  # Ctrl-C
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        console.print(" [dim](interrupted)[/dim]", end="")
    console.print()
    return answer.text
