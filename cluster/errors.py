"""The typed errors of the cluster layer: what can go wrong between processes, and what a client is told.

Owns the names alone; who raises and who answers is written in their docstrings. Knows no transport and no HTTP.
Those that end a deployment, at the command line, are in `cluster.deployment_errors`.
"""

# ruff: noqa: N818 - the names say what has happened

from __future__ import annotations


class TransportError(ConnectionError):
    """A framed stream failed; the connection is of no further use."""


class PeerClosed(TransportError):
    """The other side is gone: end of file, reset or broken pipe."""


class DeadlineExceeded(TransportError):
    """The other side did not read or write within its deadline."""


class MalformedFrame(TransportError):
    """Bytes that are not our frames: unknown kind or too long for its kind."""


class HandshakeRefused(TransportError):
    """Wrong token, version, role or rank; the message is the one the listener gave."""


class ProtocolError(TransportError):
    """A well-formed frame whose message is none of ours."""


class RequestError(Exception):
    """One request cannot be served. `status` is the HTTP status that says so, `kind` OpenAI's error type."""

    status = 500
    kind = "server_error"


class InvalidRequest(RequestError, ValueError):
    """The client asked for something impossible; the message holds the remedy."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    status = 404


class Overloaded(RequestError):
    """Too many requests wait already; try again later."""

    status = 429
    kind = "rate_limit_error"


class Unavailable(RequestError):
    """No replica takes requests now: failed, draining or not connected."""

    status = 503
    kind = "service_unavailable_error"


class GenerationFailed(RequestError):
    """A request that was already running was lost with its engine; the message names rank and reason."""


class EngineFailed(RuntimeError):
    """The engine cannot go on; the message is the root error, the first that was seen.

    `is_secondhand`: a process was lost or reported an error, and its own end says more than what was seen of it here.
    """

    def __init__(self, message: str, *, is_secondhand: bool = False) -> None:
        super().__init__(message)
        self.is_secondhand = is_secondhand
