"""MQTT brokers for tests, the embedded one and Debian's mosquitto: processes that can be killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aegis.config.mqtt_address import Address

USER, PASSWORD = "aegis", "open-sesame"
KINDS = ("embedded", "mosquitto")
"""There is "tls" besides: mosquitto with a certificate of its own."""

_MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
_WAIT_S = 30.0


def external_kind() -> str:
    """Debian's, or what this machine has."""
    return "mosquitto" if _MOSQUITTO else "embedded"


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
            tls = kind == "tls"
            ca_file = str(directory / "certificate.pem") if tls else None
            self.address = Address(host="127.0.0.1", port=port, user=USER, password=PASSWORD, tls=tls, ca_file=ca_file)
            self.url = f"mqtt{'s' if tls else ''}://{USER}:{PASSWORD}@127.0.0.1:{port}"
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

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _command(self) -> list[str]:
        if self._kind == "embedded":
            return [sys.executable, "-m", "aegis.control.broker_process", self.address.path]
        passwords, config = self._directory / "passwords", self._directory / "mosquitto.conf"
        subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, USER, PASSWORD], check=True, capture_output=True)
        passwords.chmod(0o644)
        owner = "user root\n" if os.getuid() == 0 else ""  # mosquitto's own may not read what is here
        lines = f"{owner}listener {self.address.port} 127.0.0.1\npassword_file {passwords}\n"
        config.write_text(lines + (self._certified() if self.address.tls else ""))
        return [str(_MOSQUITTO), "-c", str(config)]

    def _certified(self) -> str:
        """A certificate that is its own authority, and the lines that have it used."""
        key, certificate = self._directory / "key.pem", self._directory / "certificate.pem"
        if not key.exists():
            made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
            command = [*made.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
            subprocess.run(command, check=True, capture_output=True)
        return f"certfile {certificate}\nkeyfile {key}\n"

    def _answers(self) -> bool:
        family = socket.AF_UNIX if self.address.path else socket.AF_INET
        with socket.socket(family) as probe:
            return not probe.connect_ex(self.address.path or (self.address.host, self.address.port))


@contextmanager
def running(kind: str, directory: Path) -> Iterator[Broker]:
    if kind != "embedded" and not _MOSQUITTO:
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
