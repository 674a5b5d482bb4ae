"""The addresses at which instances reach the launcher and its proxies: private sockets, or addresses that other
machines see."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

_LOCAL = "ipc://"


class Keys(Struct, frozen=True):
    """The keys of the ports that others connect to from other machines."""

    public: str
    secret: str


def is_local(address: str) -> bool:
    return address.startswith(_LOCAL)


def path_of(address: str) -> str:
    """The path of a local address."""
    return address.removeprefix(_LOCAL)


@dataclass(frozen=True, slots=True)
class Wires:
    """Without an `ip` there are no `keys` either, and no instance is on another machine."""

    directory: str
    ip: str = ""
    keys: Keys | None = None

    def address(self, name: str) -> str:
        """An address for a hub to listen on."""
        return f"tcp://{self.ip}:*" if self.ip else f"{_LOCAL}{self.directory}/{name}"

    @property
    def market_key(self) -> str:
        return self.keys.public if self.keys else ""
