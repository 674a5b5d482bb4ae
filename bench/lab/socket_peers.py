"""The peers of a process's sockets, on this machine, as proc(5) lists them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from bench.common.processes import command_of
from bench.lab.system_calls import Send

LINKS, CLIENTS, REDIS, MQTT, RAY, OTHERS = "links", "clients", "Redis", "MQTT", "Ray", "others"
KINDS = (LINKS, CLIENTS, REDIS, MQTT, RAY, OTHERS)
ITSELF = "itself"
"""Wake-ups of own threads, pipes and files, which reach no peer."""

_COMMANDS = {
    REDIS: re.compile(r"valkey-server|redis-server"),
    MQTT: re.compile(r"mosquitto|aegis\.control\.broker_process"),
    RAY: re.compile(r"^ray::|/ray/|\braylet\b|\bgcs_server\b"),
}
_ACCEPTS = 1 << 16
_HOLDS = re.compile(r"socket:\[(\d+)\]")
_UNIX = re.compile(r"UNIX[-\w]*:\[\d+->(\d+)")
_TCP = re.compile(r"TCP(?:v6)?:\[.*:(\d+)->.*:(\d+)\]")


class Peers:
    """The peers of the sockets that were open when it looked. `server` are the server's own processes, `client` is the
    process that reads its streams."""

    def __init__(self, server: Collection[int], client: int) -> None:
        self._server = frozenset(server)
        self._client = client
        self._holders: dict[int, set[int]] = {}
        self._tcp: dict[tuple[int, int], int] = {}
        self._listening: dict[str, int] = {}
        self.look()

    def look(self) -> None:
        """Looks once more, for sockets that were opened since."""
        self._holders |= _holders()
        self._tcp |= _tcp_sockets()
        self._listening |= _listening(self._tcp)

    def at(self, send: Send) -> frozenset[int]:
        """Processes that have the other end; those that listen there, where the connection is younger than this."""
        if found := _UNIX.match(send.descriptor):
            inode = int(found[1])
        elif found := _TCP.match(send.descriptor):
            inode = self._tcp.get((int(found[2]), int(found[1]))) or self._listening.get(found[2], 0)
        else:
            inode = self._listening.get(send.connected, 0)
        return frozenset(self._holders.get(inode, ()))

    def kind(self, send: Send) -> str:
        """The kind of the process's peer."""
        if not send.descriptor.startswith(("UNIX", "TCP", "UDP", "socket")):
            return ITSELF
        found = self.at(send)
        if send.process in found:
            return ITSELF
        for pids, kind in ((self._server, LINKS), ({self._client}, CLIENTS)):
            if found & pids:
                return kind
        return next((kind for kind in map(_kind_of, found) if kind), OTHERS)


def _kind_of(pid: int) -> str:
    command = command_of(pid)
    return next((kind for kind, pattern in _COMMANDS.items() if pattern.search(command)), "")


def _holders() -> dict[int, set[int]]:
    """Processes by the sockets, which are inodes, that they have."""
    found = defaultdict[int, set[int]](set)
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                for entry in (process / "fd").iterdir():
                    with suppress(OSError):
                        if held := _HOLDS.fullmatch(str(entry.readlink())):
                            found[int(held[1])].add(int(process.name))
    return found


def _tcp_sockets() -> dict[tuple[int, int], int]:
    """Inodes by the ports here and there."""
    found = {}
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            here, there = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
            found[here, there] = int(fields[9])
    return found


def _listening(tcp: Mapping[tuple[int, int], int]) -> dict[str, int]:
    """Inodes of those that wait for connections, by port or path."""
    found = {str(here): inode for (here, there), inode in tcp.items() if not there}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS:
            found[fields[7]] = int(fields[6])
    return found
