"""The errors that end a deployment, each with its exit code.

Owns the classes a user can meet at the command line. The message is one line with the remedy in it; whoever
catches it prints it once, last, and exits with `exit_code`. Errors between processes are in `cluster.errors`.
"""

from __future__ import annotations


class DeploymentError(Exception):
    """A deployment cannot go on; the message says why and what to do."""

    exit_code = 1


class UsageError(DeploymentError):
    """The configuration or the command line asks for something impossible."""

    exit_code = 2


class ModelError(DeploymentError):
    """The model cannot be found, read or served."""

    exit_code = 3


class PlacementError(DeploymentError):
    """The cluster lacks the devices or the memory."""

    exit_code = 4


class AddressError(DeploymentError):
    """An address cannot be listened on or reached."""

    exit_code = 5


class StartupError(DeploymentError):
    """A phase of the start failed, or took longer than its deadline."""

    exit_code = 6


class EngineLostError(DeploymentError):
    """A process of a running deployment was lost."""

    exit_code = 7


class InterruptedStartError(DeploymentError):
    """The user stopped the start before it was complete."""

    exit_code = 130
