"""Checkpoints that take what they want: each is refused in a line, in bounded time and memory; others are served."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.harness import under_attack
from tests.live.server import Server, eventually, processes_of

TIME_S = 60.0
MEMORY_KIB = 8 << 20
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


LONG = {"a power", "a list", "rope"}


@pytest.mark.alone
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
    return [pid for pid, command in processes_of(server.process.pid).items() if "node.registrar_process" in command]


def _through(server: Server, proxy: str) -> httpx.Client:
    """Whose connection is one to this proxy."""
    while True:
        client = httpx.Client(base_url=server.url, timeout=TIME_S, trust_env=False, verify=False)
        if client.get("/health").headers["x-aegis-proxy"] == proxy:
            return client
        client.close()


def _is_over(server: Server) -> None:
    eventually(lambda: not _coming(server) and not _registrars(server), "nothing of it is left", 10)


@pytest.mark.parametrize("proxy", ["proxy-0", "proxy-1"])
def test_unloading_ends_a_registration_and_the_requests_that_wait_for_it(
    of_two: Server, endless: str, proxy: str
) -> None:
    load, held = {"source": endless, "name": "endless"}, {"model": "endless", "prompt": [5], "max_tokens": 1}
    with closing(_through(of_two, proxy)) as client, ThreadPoolExecutor() as threads:
        loading = threads.submit(client.post, "/models/load", json=load)
        eventually(lambda: _coming(of_two) == ["endless"] and _registrars(of_two), "it is being registered")
        waiting = threads.submit(of_two.post, "/v1/completions", held)
        assert of_two.post("/models/load", load).status_code == 409
        assert not waiting.done()
        assert of_two.post("/models/unload", {"model": "endless"}).status_code == 200
        reply = loading.result(TIME_S)
        assert (reply.status_code, "was unloaded while it was registered" in reply.text) == (409, True)
        assert waiting.result(TIME_S).status_code == 404
    _is_over(of_two)
    assert of_two.post("/models/unload", {"model": "endless"}).status_code == 404


@pytest.mark.parametrize("proxy", ["proxy-0", "proxy-1"])
def test_a_registration_ends_with_who_asked_for_it(of_two: Server, endless: str, proxy: str) -> None:
    with closing(_through(of_two, proxy)) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/models/load", json={"source": endless}, timeout=1)
    _is_over(of_two)
