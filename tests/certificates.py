"""Certificates that vouch for themselves, of 127.0.0.1."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(certificate: Path, key: Path, *, password: str = "") -> None:
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=localhost"
    secret = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = [*made.split(), *secret, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
