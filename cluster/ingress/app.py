"""The HTTP door: routes, and nothing else.

Owns the FastAPI application. What an endpoint answers is written in its own file; text and tokens are the frontend's.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from cluster.errors import ModelNotFound, RequestError
from cluster.frontend import Frontend
from cluster.ingress import http
from cluster.ingress.chat import ChatAnswer
from cluster.ingress.completions import CompletionAnswer
from cluster.ingress.schemas import ChatBody, CompletionBody, parse_body
from configs.schema import IngressConfig

Starter = Callable[[Frontend, Any, dict[str, Any]], Coroutine[Any, Any, CompletionAnswer | ChatAnswer]]


def create_app(frontend: Frontend, config: IngressConfig, *, model: str) -> FastAPI:
    """The OpenAI-compatible application.

    `frontend` is started and closed by the caller, in the loop that serves the app. `model` is the name that
    clients use. Serve it with `uvicorn.Server(uvicorn.Config(app, ...))`.
    """
    app = FastAPI(title="Antiphon", description="Large language models over the OpenAI API")
    _handle_errors(app)
    _add_generation(app, frontend, config, model)
    _add_information(app, frontend, config, model)
    return app


def _handle_errors(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, http.answer_request_error)
    app.add_exception_handler(HTTPException, http.answer_http_exception)
    app.add_exception_handler(http.ClientGone, http.answer_client_gone)
    app.add_exception_handler(Exception, http.answer_crash)


def _add_generation(app: FastAPI, frontend: Frontend, config: IngressConfig, model: str) -> None:
    max_body = int(config.max_body_mib * 1024 * 1024)

    async def body_of(request: Request, kind: type[Any]) -> Any:
        http.check_key(request, config.api_key)
        body = parse_body(await http.read_body(request, max_body), kind)
        _check_model(body.model, model)
        return body

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await body_of(request, CompletionBody)
        return await _answer(request, CompletionAnswer.start, frontend, body, _head("cmpl", model))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await body_of(request, ChatBody)
        return await _answer(request, ChatAnswer.start, frontend, body, _head("chatcmpl", model))


def _check_model(asked: str | None, served: str) -> None:
    if asked not in (None, served):
        raise ModelNotFound(f"model {asked!r} is not served here; this is {served!r}", parameter="model")


def _add_information(app: FastAPI, frontend: Frontend, config: IngressConfig, model: str) -> None:
    created = int(time.time())

    def entry() -> dict[str, Any]:
        lengths = [status.max_model_len for status in frontend.status() if status is not None]
        kind = {"object": "model", "created": created, "owned_by": "antiphon"}
        return {"id": model, **kind, "max_model_len": max(lengths, default=None)}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        http.check_key(request, config.api_key)
        return http.json_response({"object": "list", "data": [entry()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        http.check_key(request, config.api_key)
        _check_model(name, model)
        return http.json_response(entry())

    @app.get("/health")
    async def health() -> Response:
        """200 only while at least one replica has all its ranks and takes requests."""
        replicas = [
            {"state": "disconnected"}
            if status is None
            else {
                "state": status.state,
                "ranks": status.num_ranks,
                "ranks_alive": status.num_ranks_alive,
                "running": status.num_running,
                "waiting": status.num_waiting,
            }
            for status in frontend.status()
        ]
        word = "healthy" if frontend.is_healthy else "unhealthy"
        report = {"status": word, "problems": frontend.problems(), "replicas": replicas}
        return http.json_response(report, 200 if frontend.is_healthy else 503)


async def _answer(
    request: Request,
    start: Starter,
    frontend: Frontend,
    body: Any,
    head: dict[str, Any],
) -> Response:
    """Stream or wait; either way the request is aborted when the client hangs up."""
    if body.stream:
        answer = await http.unless_disconnected(request, start(frontend, body, head))
        return http.EventStream(answer.events(), on_close=answer.abort)

    async def whole() -> dict[str, Any]:
        answer = await start(frontend, body, head)
        try:
            return await answer.whole()
        finally:
            answer.abort()

    return http.json_response(await http.unless_disconnected(request, whole()))


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
