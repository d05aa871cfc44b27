"""Which cluster to join, and the environment Ray must find when it is imported.

Pure: takes the environment as an argument. Ray reads its settings at import, so whoever uses `cluster.runtime`
applies `ray_environment` first. Does not know Ray.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from cluster.deployment_errors import AddressError, UsageError

LOCAL = "local"
PROBE_TIMEOUT_S = 5.0

PRIVATE_CLUSTER = {
    # Its control service dies with this driver and never comes back: nobody should wait a minute for it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    # Idle workers for the tasks of a first job, one for each core: ours has actors alone.
    "RAY_prestart_worker_first_driver": "0",
    # A process that is a moment too early asks again soon, instead of a second later. In all it is 10 s, as in Ray.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
"""For the Ray processes that we start ourselves. A version of Ray that does not know one of these ignores it."""


def choose_address(configured: str, environ: Mapping[str, str]) -> str:
    """`auto` is $RAY_ADDRESS where set (as under `ray job submit`), else a private cluster of this machine.

    Raises:
        UsageError: the address is one that a driver cannot join.
    """
    address = environ.get("RAY_ADDRESS") or LOCAL if configured == "auto" else configured
    if address.startswith(("http://", "https://")):
        raise UsageError(
            f"{address} is the address of a dashboard; submit the deployment with "
            f"`ray job submit --address {address} --working-dir . -- python deploy.py serve CONFIG`, "
            "or set cluster.address to local or to the head's host:port"
        )
    if address in (LOCAL, "auto") or address.startswith("ray://"):
        if address.startswith("ray://"):
            raise UsageError(f"Ray Client ({address}) is not supported; run on a node of the cluster or submit a job")
        return LOCAL if address == LOCAL else address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"cluster.address is {address!r}; give auto, local or host:port")
    return address


def ray_environment(address: str, environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """Variables to set before Ray is imported; what the user has set stays.

    A private cluster gets a token of its own, handed on by environment alone, so that no other user of the machine
    can run code in it. A cluster that is joined is spoken to with a token if there is one.
    """
    wanted = {"RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    if address == LOCAL:
        wanted |= {"RAY_AUTH_MODE": "token"} | PRIVATE_CLUSTER
    else:
        named = environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_TOKEN_PATH")
        wanted["RAY_AUTH_MODE"] = "token" if named or (home / ".ray" / "auth_token").exists() else "disabled"
    chosen = {name: value for name, value in wanted.items() if name not in environ}
    if address == LOCAL and environ.get("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN" not in environ:
        chosen["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return chosen


def check_reachable(address: str) -> None:
    """A head that does not answer is refused in seconds; Ray itself would try for a minute.

    Raises:
        AddressError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise AddressError(
            f"no Ray head answers at {address} ({error}); start one with `ray start --head`, "
            "or set cluster.address=local"
        ) from error
