"""A Ray cluster of two nodes on this machine, for tests and benchmarks: real raylets, each at an address of its own.

Where this process may, each node is a network namespace and a veth pair is the cable between them, which can be cut.
Ray listens on every address of its machine; in a namespace that is the cable alone. Elsewhere both nodes share
127.0.0.1, and there is no cable to cut.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray

OBJECT_STORE_BYTES = 192 << 20
_NAMES = ("node-a", "node-b")
_HEAD_OPTIONS = ("--include-dashboard", "false", "--no-monitor")
_START_S = 60.0
_POLL_S = 0.05
_NAMESPACES = Path("/var/run/netns")
_NOWHERE = "02:00:00:00:00:01"  # no machine has this address on the cable
_CLONE_NEWNET = 0x40000000
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # everybody on the cable may connect
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "500",  # a node that is gone is missed within 3 s
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class RayNode:
    """One raylet and what it started. It has one of the resource that is called as it is."""

    name: str
    ip: str
    namespace: str | None
    process: subprocess.Popen[bytes]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and what it starts meanwhile, is on the node: a driver that connects, a server that listens."""
        if not self.namespace:
            yield
            return
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            there = os.open(_NAMESPACES / self.namespace, os.O_RDONLY)
            _enter(there)
            os.close(there)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def kill(self) -> None:
        """Kills the raylet and all its workers at once, as if the power were cut."""
        for pid in _below(self.process.pid):
            _signal(pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True, slots=True)
class RayCluster:
    """`address` is for `ray.init` and `ray start`, called inside a node."""

    address: str
    nodes: tuple[RayNode, RayNode]
    environment: Mapping[str, str]

    @property
    def has_cable(self) -> bool:
        return self.nodes[0].namespace is not None

    @contextmanager
    def driver(self, at: int = 0) -> Iterator[None]:
        """This process is connected to Ray, by the raylet of that node, and its thread is there."""
        node = self.nodes[at]
        with node.inside():
            ray.init(self.address, _node_ip_address=node.ip, log_to_driver=False, logging_level="error")
            try:
                yield
            finally:
                ray.shutdown()

    def node_id(self, at: int) -> str:
        """Ray's name of that node; within `driver`."""
        (found,) = [node["NodeID"] for node in ray.nodes() if self.nodes[at].name in node["Resources"]]
        return str(found)

    def cut(self) -> None:
        """No packet arrives any more; neither side is told."""
        assert self.has_cable, "both nodes share one address"
        for here, there in (self.nodes, self.nodes[::-1]):
            _ip("-n", here.namespace, "neigh", "replace", there.ip, "lladdr", _NOWHERE, "dev", "cable")

    def mend(self) -> None:
        for here, there in (self.nodes, self.nodes[::-1]):
            _ip("-n", here.namespace, "neigh", "del", there.ip, "dev", "cable")


@contextmanager
def ray_cluster(cpus: int = 8, object_store_bytes: int = OBJECT_STORE_BYTES) -> Iterator[RayCluster]:
    """A head and a second node, running; whatever runs on them is ended on leaving. `cpus` is what each says it has."""
    with ExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets have to be short
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        namespaces = _cabled(stack)
        ips = ("10.213.7.1", "10.213.7.2") if namespaces[0] else ("127.0.0.1", "127.0.0.1")
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment |= {**_ENVIRONMENT, "RAY_TMPDIR": directory}
        address = f"{ips[0]}:{6379 if namespaces[0] else _free_port()}"
        nodes = []
        for name, ip, namespace in zip(_NAMES, ips, namespaces, strict=True):
            head = name == _NAMES[0]
            port = address.rpartition(":")[2]
            options = ["--head", "--port", port, *_HEAD_OPTIONS] if head else ["--address", address]
            options += ["--node-ip-address", ip, "--num-cpus", str(cpus), "--resources", json.dumps({name: 1})]
            options += ["--object-store-memory", str(object_store_bytes), "--include-log-monitor", "false"]
            nodes.append(stack.enter_context(_node(name, ip, namespace, options, environment, Path(directory))))
        yield RayCluster(address, (nodes[0], nodes[1]), environment)


@contextmanager
def _node(
    name: str, ip: str, namespace: str | None, options: Sequence[str], environment: Mapping[str, str], directory: Path
) -> Iterator[RayNode]:
    command = ["ip", "netns", "exec", namespace] if namespace else []
    command += [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block", *options]
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, "PATH": _PATH},
            start_new_session=True,
        )
    node = RayNode(name, ip, namespace, process)
    try:
        deadline_s = time.monotonic() + _START_S
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(_POLL_S)
        yield node
    finally:
        node.kill()


# --- the cable --------------------------------------------------------------------------------------------------------


def _cabled(stack: ExitStack) -> tuple[str, str] | tuple[None, None]:
    """Namespaces with a cable; none where the system has no `ip` or lets us have no part of it, as in many containers,
    where root may make namespaces, or not even that, and no cables."""
    if os.geteuid() == 0 and shutil.which("ip", path=_PATH):
        with suppress(subprocess.CalledProcessError):
            return stack.enter_context(_cable())
    return None, None


@contextmanager
def _cable() -> Iterator[tuple[str, str]]:
    """Two namespaces that see each other and nothing else. All that runs in them is ended before they go."""
    _sweep()
    a, b = (f"aegis-{os.getpid()}-{name}" for name in _NAMES)
    try:
        for namespace in (a, b):
            _ip("netns", "add", namespace)
        _ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for namespace, ip in ((a, "10.213.7.1/30"), (b, "10.213.7.2/30")):
            _ip("-n", namespace, "addr", "add", ip, "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", namespace, "link", "set", device, "up")
        yield a, b
    finally:
        for namespace in (a, b):
            _remove(namespace)


def _sweep() -> None:
    """Away with what killed processes left."""
    for namespace in _NAMESPACES.glob("aegis-*-node-*") if _NAMESPACES.is_dir() else ():
        if not Path("/proc", namespace.name.split("-")[1]).exists():
            _remove(namespace.name)


def _remove(namespace: str) -> None:
    if (_NAMESPACES / namespace).exists():
        for pid in _ip("netns", "pids", namespace).split():
            _signal(int(pid), signal.SIGKILL)
        _ip("netns", "del", namespace)


def _ip(*arguments: str | None) -> str:
    return subprocess.run(_ip_command(*arguments), check=True, capture_output=True, text=True).stdout


def _ip_command(*arguments: str | None) -> list[str]:
    return [shutil.which("ip", path=_PATH) or "ip", *map(str, arguments)]


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


# --- processes --------------------------------------------------------------------------------------------------------


def _below(root: int) -> list[int]:
    """A process and all its descendants, itself first: then none is left to start more."""
    family, parents = [root], _parents()
    for parent in family:
        family += [pid for pid, its in parents.items() if its == parent]
    return family


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
