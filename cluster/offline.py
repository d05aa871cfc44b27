"""Answering without HTTP: a batch of prompts, or a conversation at the terminal.

Owns progress and output. The engine is reached through a `Frontend` in this process, over the same
sockets as the ingress uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.deployment_errors import DeploymentError, EngineLostError, InterruptedStartError, UsageError
from cluster.errors import InvalidRequest, RequestError
from cluster.prompts import Message, Prompt
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.frontend import Frontend
    from cluster.supervisor import Supervisor

WATCH_S = 0.2


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


@contextlib.contextmanager
def opened(output: Path | None) -> Iterator[IO[str] | None]:
    """Where the answers go, opened before a model is loaded for them.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        sink = output.open("w", encoding="utf-8") if output else None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}; give another --output") from error
    try:
        yield sink
    finally:
        if sink:
            with contextlib.suppress(OSError):  # every answer was flushed: what could not be written has been said
                sink.close()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raises: UsageError, where nobody reads any more, as behind `| head`, or where the disk is full."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the interpreter would try again, at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(f"the answers cannot be written: {error.strerror or error}") from error


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
    supervisor: Supervisor, prompts: Sequence[Prompt], params: SamplingParams, *, sink: IO[str] | None, console: Console
) -> None:
    """Answer every prompt. One is streamed to standard output; several are shown as they finish.

    Raises:
        DeploymentError: the deployment was lost, the user stopped it, or prompts were refused.
    """
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
                                with _writing():
                                    print(text, end="", flush=True)
                    except RequestError as error:
                        result.error = str(error)
                progress.advance(task)
                _publish(result, sink, show_live)
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


def _publish(answer: Answer, sink: IO[str] | None, was_shown: bool) -> None:
    with _writing():
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
                try:
                    reply = runner.run(_reply(supervisor, frontend, messages, params, console))
                except InvalidRequest as error:  # as a rule: the conversation has become too long
                    console.print(f"[bold red]not answered:[/bold red] {escape(str(error))}", highlight=False)
                    messages.pop()
                    continue
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
    except InvalidRequest:
        raise
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
