"""The Ray cluster that a market is placed in: one that runs already, or one of its own on this machine.

`ray` is imported here when it is asked for, and nowhere before.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aegis.core.errors import UserError, install_advice
from aegis.process.error_lines import flattened

LOCAL, AUTO = "local", "auto"
_OBJECT_STORE_BYTES = 256 << 20  # only small pieces are put there
_ANSWERS_WITHIN_S = 3.0
_ENDS_WITHIN_S = 5.0
_LINE_CHARACTERS = 200
_QUIET = {"logging_level": "error", "include_dashboard": False}
_OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # an idle process for each core
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Connected. `ip` is that of this machine, as the others see it."""

    ip: str
    name: str  # for messages


@asynccontextmanager
async def connected(address: str, *, cpus: float) -> AsyncIterator[Cluster]:
    """To the cluster at the address; `auto`: to one that this machine is in, else `local`: to a new one, which has so
    many `cpus` at least and ends with it. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="aegis-ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        await asyncio.to_thread(_join, address, cpus, directory)  # paths of sockets have to be short
        import ray

        try:
            yield await asyncio.to_thread(_here, address)
        finally:
            await ended(ray.shutdown)


async def ended(call: Callable[[], object]) -> None:
    """Ray's call, which gives something back, is waited for for 5 s: where a signal to all processes has ended the
    cluster first, it does not return for minutes."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    await asyncio.wait([task], timeout=_ENDS_WITHIN_S)
    if task.done():
        task.result()


def not_run_there(error: BaseException) -> UserError:
    """Where a node's process cannot import what it is to run, Ray says so with a traceback, in whose last line is
    why."""
    said = str(getattr(error, "cause", None) or error).strip() or type(error).__name__
    why = said.splitlines()[-1][:_LINE_CHARACTERS]
    return UserError(f"a node of the Ray cluster cannot run aegis: {why}; install the same version everywhere")


def refuse_without_ray() -> None:
    """To be asked before anything else of this package is imported. Raises UserError."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"--ray needs more packages; {install_advice('ray')}", param="ray")


def _join(address: str, cpus: float, directory: str) -> None:
    found = _found_here() if address == AUTO else address
    if found is None or found == LOCAL:
        _start_own(cpus, directory)
        return
    _refuse_unreachable(found)
    import ray

    try:
        ray.init(found, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise UserError(f"no Ray cluster can be joined at {found}: {_line(error)}", param="ray") from None


def _found_here() -> str | None:
    """The address of the cluster that this machine is part of. Raises UserError."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address: str | None = canonicalize_bootstrap_address(AUTO)
    except ConnectionError:
        return None  # there was one
    except ValueError as error:
        raise UserError(f"RAY_ADDRESS: {_line(error)}", param="ray") from None
    return address


def _refuse_unreachable(address: str) -> None:
    """Ray itself tries for minutes. Raises UserError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWERS_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"no Ray cluster answers at {address} ({_line(error)}); see --ray", param="ray") from None


def _line(error: Exception) -> str:
    return (flattened(error) or type(error).__name__)[:_LINE_CHARACTERS]


def _start_own(cpus: float, directory: str) -> None:
    """Its files are in the directory. A client without the user's token (~/.ray/auth_token) is refused, unless the user
    has told Ray otherwise."""
    os.environ.update(_OWN)
    import ray

    try:
        ray.init(
            LOCAL,
            num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=directory,
            **_QUIET,
        )
    except (ConnectionError, RuntimeError, OSError) as error:
        raise UserError(f"Ray does not start: {_line(error)}", param="ray") from None


def _here(address: str) -> Cluster:
    import ray

    own = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == own]
    return Cluster(str(node["NodeManagerAddress"]), address)


def alive() -> dict[str, dict[str, Any]]:
    """The nodes of the cluster by id, as Ray describes them."""
    import ray

    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
