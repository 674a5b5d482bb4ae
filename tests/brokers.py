"""MQTT brokers for tests, the embedded one and Debian's mosquitto: processes that can be killed and started again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aegis.runtime.bus.address import Address

USER, PASSWORD = "aegis", "open-sesame"
KINDS = ("embedded", "mosquitto")
_MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
_WAIT_S = 30.0


class Broker:
    """One that runs, with nothing retained when it starts again."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        if kind == "embedded":
            self.address = Address(path=str(directory / "mqtt"))
            self.url = f"mqtt+unix://{directory}/mqtt"
        else:
            port = _free_port()
            self.address = Address(host="127.0.0.1", port=port, user=USER, password=PASSWORD)
            self.url = f"mqtt://{USER}:{PASSWORD}@127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _WAIT_S
        while not self._answers():
            assert self._process.poll() is None, f"{self._kind} ended with code {self._process.returncode}"
            assert time.monotonic() < deadline_s, f"{self._kind} does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self.address.path:
            Path(self.address.path).unlink(missing_ok=True)

    def _command(self) -> list[str]:
        if self._kind == "embedded":
            return [sys.executable, "-m", "aegis.runtime.bus.broker", self.address.path]
        passwords, config = self._directory / "passwords", self._directory / "mosquitto.conf"
        subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, USER, PASSWORD], check=True, capture_output=True)
        passwords.chmod(0o644)
        owner = "user root\n" if os.getuid() == 0 else ""  # mosquitto's own may not read what is here
        config.write_text(f"{owner}listener {self.address.port} 127.0.0.1\npassword_file {passwords}\n")
        return [str(_MOSQUITTO), "-c", str(config)]

    def _answers(self) -> bool:
        family = socket.AF_UNIX if self.address.path else socket.AF_INET
        with socket.socket(family) as probe:
            return not probe.connect_ex(self.address.path or (self.address.host, self.address.port))


@contextmanager
def running(kind: str, directory: Path) -> Iterator[Broker]:
    if kind == "mosquitto" and not _MOSQUITTO:
        pytest.skip("no mosquitto; on Debian: apt-get install mosquitto")
    directory.mkdir(parents=True, exist_ok=True)
    broker = Broker(kind, directory)
    try:
        yield broker
    finally:
        broker.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
