"""Checkpoints that take what they want: each is refused in a line, in bounded time and memory; others are served."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.harness import under_attack
from tests.live.server import Server, eventually, processes_of

TIME_S = 60.0
MEMORY_KIB = 9 << 20
_REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
_GROWING = {"type": "Sequence", "normalizers": [_REPLACE] * 4}


def _edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _template(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "chat_template.jinja").write_text(text) and None


def _fifo(directory: Path) -> None:
    (directory / "special_tokens_map.json").unlink(missing_ok=True)
    os.mkfifo(directory / "special_tokens_map.json")


def _device(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("/dev/zero")


def _sparse(directory: Path) -> None:
    os.truncate(directory / "tokenizer_config.json", 1 << 40)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "layers": (_edit("config.json", num_hidden_layers=10_000_000), "num_hidden_layers is 10000000"),
    "rope": (
        _edit("config.json", rope_parameters={"rope_type": "yarn"}),
        "config.json is not of a llama: Missing required keys",
    ),
    "a growing tokenizer": (
        _edit("tokenizer.json", normalizer=_GROWING),
        "its normalizer may make a text over 10^9 times as long",
    ),
    "fifo": (_fifo, "is no file"),
    "device": (_device, "is no file"),
    "sparse": (_sparse, "tokenizer_config.json has 1048576 MiB"),
    "syntax": (_template("{% for m in messages %}"), "its chat template, line 1"),
    "loops": (
        _template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "trying the chat template took more than",
    ),
    "a power": (_template("{{ 10 ** (10 ** 9) }}"), "trying the chat template took more than"),
    "a list": (_template("{{ [0] * 10 ** 11 }}"), "chat template cannot be rendered"),
}


LONG = {"a power"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in HOSTILE]
)
def test_a_checkpoint_that_takes_what_it_wants_is_refused_in_a_line(
    name: str, server: Server, checkpoints_dir: Path, tmp_path: Path
) -> None:
    spoil, expected = HOSTILE[name]
    directory = tmp_path / "hostile"
    shutil.copytree(checkpoints_dir / "llama", directory)
    spoil(directory)
    with under_attack(server, f"checkpoint: {name}") as report:
        began_s = time.monotonic()
        reply = server.post("/models/load", {"source": str(directory), "name": "hostile"})
        took_s = time.monotonic() - began_s
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400, message
    assert any(word in message for word in expected.split("|")), message
    assert "\n" not in message and len(message) < 1000
    assert took_s < TIME_S
    assert report.others_peak_kib < MEMORY_KIB
    assert "hostile" not in {model["id"] for model in server.get("/v1/models").json()["data"]}


@pytest.fixture
def endless(checkpoints_dir: Path, tmp_path: Path) -> str:
    directory = tmp_path / "endless"
    shutil.copytree(checkpoints_dir / "llama", directory)
    HOSTILE["loops"][0](directory)
    return str(directory)


def _coming(server: Server) -> list[str]:
    return [model["id"] for model in server.get("/v1/models").json()["coming"]]


def _registrars(server: Server) -> list[int]:
    return [pid for pid, command in processes_of(server.process.pid).items() if "runtime.registrar" in command]


def test_unloading_ends_a_registration(server: Server, endless: str) -> None:
    replies: list[httpx.Response] = []
    load = {"source": endless, "name": "endless"}
    loading = threading.Thread(target=lambda: replies.append(server.post("/models/load", load)))
    loading.start()
    eventually(lambda: _coming(server) == ["endless"] and _registrars(server), "it is being registered")
    assert server.post("/models/load", load).status_code == 409
    assert server.post("/models/unload", {"model": "endless"}).status_code == 200
    loading.join(TIME_S)
    (reply,) = replies
    assert (reply.status_code, "was unloaded" in reply.text) == (409, True)
    eventually(lambda: not _coming(server) and not _registrars(server), "nothing of it is left")
    assert server.post("/models/unload", {"model": "endless"}).status_code == 404


def test_a_registration_ends_with_who_asked_for_it(server: Server, endless: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/models/load", json={"source": endless}, timeout=2, trust_env=False)
    eventually(lambda: not _coming(server) and not _registrars(server), "nothing of it is left", 10)
