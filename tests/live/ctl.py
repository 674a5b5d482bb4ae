"""`aegis ctl`, as users give it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.live.server import ROOT, Server


def ctl(server: Server, *words: str, mqtt: str | None = None) -> subprocess.CompletedProcess[str]:
    """To the broker at `mqtt`, or the server's own."""
    how = ["--mqtt", mqtt] if mqtt else ["--url", server.url]
    command = [sys.executable, "-m", "aegis.cli.main", "ctl", *how, "--timeout", "300", *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)
