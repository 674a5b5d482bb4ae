"""Where instances reach the launcher and its proxies: private sockets, or an address that other machines see."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.runtime.link import Keys


@dataclass(frozen=True, slots=True)
class Wires:
    """Without an `ip` there are no `keys` either, and nobody is on another machine."""

    directory: str
    ip: str = ""
    keys: Keys | None = None

    def address(self, name: str) -> str:
        """For a hub to listen on."""
        return f"tcp://{self.ip}:*" if self.ip else f"ipc://{self.directory}/{name}"

    @property
    def market_key(self) -> str:
        return self.keys.public if self.keys else ""
