"""Addresses that lead nowhere are refused in a line, at once, and a cluster that is gone holds up no end."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aegis.cluster import ray_cluster
from aegis.core.errors import UserError
from tests.long_forms import first_of


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        ray_cluster._refuse_unreachable(f"127.0.0.1:{port}")


def test_a_call_that_does_not_return_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    async def end() -> None:
        try:
            await ray_cluster.ended(answered.wait)
        finally:
            answered.set()  # or the loop, which ends, waits for the thread

    monkeypatch.setattr(ray_cluster, "_ENDS_WITHIN_S", 0.01)
    asyncio.run(end())


def test_what_a_call_raises_at_the_end_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(ray_cluster.ended(lambda: 1 / 0))


LAUNCH = """
import sys
sys.modules["ray"] = None  # as where it is not installed
from aegis.cli.main import main
sys.argv = ["aegis", "launch", "--port", "0", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("by", first_of(1, ["option", "file"]))
def test_without_ray_it_is_told_what_to_install(tmp_path: Path, by: str) -> None:
    file = tmp_path / "aegis.yaml"
    file.write_text("ray: {address: auto}")
    asked = ["--ray", "local"] if by == "option" else [str(file)]
    done = subprocess.run([sys.executable, "-c", LAUNCH, *asked], capture_output=True, text=True)
    assert done.stderr == "aegis: --ray needs more packages; where aegis was cloned: pip install -e '.[ray]'\n"
    assert (done.stdout, done.returncode) == ("", 2)


def test_ray_is_not_imported_where_nobody_asks_for_it() -> None:
    code = "import sys, aegis.launcher.launch, aegis.instance.process; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
