"""The driver counts the GPUs that its process sees: a machine's have the names that Ray has for them. However a machine
ends, nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aegis.cluster.actor_messages import PoolOpened
from aegis.cluster.machine_actor import MachineActor, ordinal_of
from aegis.core.errors import UserError
from tests.live.server import eventually

ONE, OTHER = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1b2c3d4e-0000-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("gpu", "visible", "ordinal"),
    [
        ("", "4,5", 0),
        ("3", None, 3),
        ("4", "4,5", 0),
        ("5", "4, 5", 1),
        ("5", "7,5,15", 1),
        (OTHER, f"{ONE},{OTHER}", 1),
        (OTHER, "GPU-89,GPU-1b2c", 1),
        ("GPU-1b2c", f"{ONE},{OTHER}", 1),
    ],
)
def test_a_gpu_has_its_place_among_those_that_are_seen(gpu: str, visible: str | None, ordinal: int) -> None:
    assert ordinal_of(gpu, visible) == ordinal


@pytest.mark.parametrize(
    ("gpu", "visible"), [("6", "4,5"), ("4", ""), (ONE, "0,1"), (ONE, None), ("1", "15"), (ONE, f"{OTHER},")]
)
def test_a_gpu_that_is_not_seen_is_refused_in_a_line(gpu: str, visible: str | None) -> None:
    with pytest.raises(UserError, match=f"GPU {gpu} .* CUDA_VISIBLE_DEVICES") as refused:
        ordinal_of(gpu, visible)
    assert "\n" not in refused.value.message


def test_the_refusal_is_the_answer_to_who_wants_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    opened = msgspec.msgpack.decode(asyncio.run(MachineActor().open_pool("cuda", 1 << 20, "6")), type=PoolOpened)
    assert "GPU 6 " in opened.refusal


_OPENED = """
import asyncio, sys
import msgspec
from aegis import __version__
from aegis.cluster.actor_messages import Opening
from aegis.cluster.machine_actor import MachineActor
from aegis.node import instance_processes

class Nobody:
    def close(self): ...

instance_processes.fork_server = lambda processes, engine: Nobody()

async def main():
    machine = MachineActor()
    await machine.open(msgspec.msgpack.encode(Opening("machine-0", __version__, 1 << 20, 1 << 20, 1, 1)))
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await machine.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", [False, True])
def test_its_directory_is_gone_when_it_is(tmp_path: Path, killed: bool) -> None:
    """Ray kills it where it does not answer, or where memory is short."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _OPENED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as machine:
        assert machine.stdin and machine.stdout
        assert machine.stdout.readline() == b"open\n"
        assert list(tmp_path.iterdir())
        if killed:
            machine.kill()
    eventually(lambda: not list(tmp_path.iterdir()), "nothing is left", 10.0)
