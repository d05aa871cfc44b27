"""The command line: serve, generate, chat, demo.

Owns the options, what runs before Ray is touched, and how an error ends the program: one line, last, with the exit
code of its class. Importing this module is quick: Ray is imported when a command needs it, torch never.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cluster.deployment_errors import DeploymentError, InterruptedStartError, UsageError
from cluster.phases import Phases, StopRequest

if TYPE_CHECKING:
    from cluster.runtime import Runtime
    from cluster.supervisor import Supervisor
    from configs.schema import EngineConfig

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Antiphon serves large language models on a Ray cluster. CONFIG is a YAML file or the name of a preset.",
)
errors = Console(stderr=True)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, or the name of a preset")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.OPTION=VALUE", help="override one option; may be repeated"),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="show the log of every process")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="longest answer, in tokens")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token")]
TopPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="draw from the likeliest tokens of this mass")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="makes drawing repeatable")]


@app.command()
def serve(config: ConfigArgument, overrides: SetOption = None, verbose: VerboseOption = False) -> None:
    """Bring a deployment up and serve HTTP until SIGTERM or SIGINT, which drain it."""
    with _one_line_errors():
        with _launched(_load(config, overrides), with_ingress=True, verbose=verbose) as supervisor:
            url, name = supervisor.deployment.url, supervisor.deployment.model_name
            supervisor.phases.show(f"serving {name} at {url}/v1 after {supervisor.phases.elapsed:.1f} s; Ctrl-C drains")
            supervisor.watch()
        errors.print("stopped; nothing is left running", highlight=False)


@app.command()
def generate(
    config: ConfigArgument,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="a prompt; may be repeated")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help=".jsonl with `prompt` or `messages` per line, else a prompt per line"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write JSON lines here")] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat", help="put prompts through the model's chat template")
    ] = False,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = None,
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Answer prompts offline: one is streamed to standard output, several are answered as a batch."""
    with _one_line_errors():
        from cluster.offline import generate_batch, opened
        from cluster.prompts import read_prompts

        prompts = read_prompts(prompt or [], file, as_chat=chat_template)
        engine = _load(config, overrides)
        params = _sampling_params(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        with opened(output) as sink, _launched(engine, with_ingress=False, verbose=verbose) as supervisor:
            generate_batch(supervisor, prompts, params, sink=sink, console=errors)


@app.command()
def chat(
    config: ConfigArgument,
    system: Annotated[str | None, typer.Option(help="instructions that come before the conversation")] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    seed: SeedOption = None,
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Talk to the model. An empty line, or the end of input, ends the conversation."""
    with _one_line_errors():
        from cluster.offline import converse

        engine = _load(config, overrides)
        params = _sampling_params(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        with _launched(engine, with_ingress=False, verbose=verbose) as supervisor:
            converse(supervisor, params, system=system)


@app.command()
def demo(
    config: ConfigArgument,
    max_tokens: MaxTokensOption = 80,
    overrides: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Bring a deployment up, ask it several questions at once over HTTP, and time the answers."""
    with _one_line_errors():
        from cluster.demo import ask_questions

        # Any free port, unless one is asked for: a demo should not fail because something else listens on 8000.
        engine = _load(config, ["ingress.port=0", *(overrides or [])])
        with _launched(engine, with_ingress=True, verbose=verbose) as supervisor:
            phases = supervisor.phases
            phases.show(f"{supervisor.deployment.model_name} is up after {phases.elapsed:.1f} s\n")
            ask_questions(supervisor, max_tokens=max_tokens)


def main() -> None:
    """The program. Its exit code is 0, or that of the error's class in `cluster.deployment_errors`."""
    try:
        app(prog_name="deploy.py")
    except SystemExit as end:
        supervisor = sys.modules.get("cluster.supervisor")
        if supervisor and supervisor.is_still_closing():
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def _load(config: str, overrides: list[str] | None) -> EngineConfig:
    from configs.loader import load_config

    return load_config(config, overrides or [])


def _sampling_params(**options: Any) -> Any:
    from scheduler.sampling_params import SamplingParams

    return SamplingParams(**options)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # an account without one, as in many containers
        return Path("/nonexistent")


@contextmanager
def _launched(config: EngineConfig, *, with_ingress: bool, verbose: bool) -> Iterator[Supervisor]:
    """A deployment, after everything that can be refused without Ray has been looked at."""
    from cluster.identity import python_path, source_root
    from cluster.preflight import check_port_free
    from cluster.ray_environment import LOCAL, check_reachable, choose_address, ray_environment

    root = source_root()
    if with_ingress:
        check_port_free(config.ingress.host, config.ingress.port)
    address = choose_address(config.cluster.address, os.environ)
    if address != LOCAL:
        check_reachable(address)
    os.environ.update(ray_environment(address, os.environ, _home()))
    stop = StopRequest()
    stop.install()

    def connect() -> Runtime:
        from cluster.runtime import Runtime

        runtime = Runtime.connect(address, python_path=python_path(root), forward_logs=verbose)
        stop.install()  # Ray has put its own handler there
        return runtime

    from cluster.supervisor import deployed

    phases = Phases(errors)
    with deployed(config, connect, phases=phases, stop=stop, with_ingress=with_ingress) as supervisor:
        yield supervisor


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Whatever ended the command has been cleaned up; now say why, once."""
    try:
        yield
    except DeploymentError as error:
        _end(str(error), error.exit_code)
    except ValueError as error:  # the configuration, or a sampling parameter
        _end(str(error), UsageError.exit_code)
    except KeyboardInterrupt:
        _end("interrupted", InterruptedStartError.exit_code)


def _end(message: str, exit_code: int) -> None:
    errors.print(f"[bold red]error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code)
