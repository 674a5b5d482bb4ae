"""Addresses that lead nowhere are refused in a line, at once."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys

import pytest

from aegis.core.errors import UserError
from aegis.runtime.ray import cluster


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        cluster._refuse_silence(f"127.0.0.1:{port}")


def test_without_ray_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'aegis-serve\[ray\]'"):
        cluster.refuse_without_ray()


def test_ray_is_not_imported_where_nobody_asks_for_it() -> None:
    code = "import sys, aegis.runtime.launch, aegis.runtime.instance; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
