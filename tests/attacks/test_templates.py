"""A checkpoint whose template or tokenizer takes all it can gets a bounded share, and other models all they need."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks import hostile
from tests.attacks.beside import asked_beside
from tests.attacks.harness import at_once, attacked, ends_soon, under_attack
from tests.live.server import WAIT_S, Server
from tests.long_forms import LONG, first_of

pytestmark = pytest.mark.alone

CLIENTS = 12
STAYING = 4 if LONG else 1
LEAVE_S = 1.0
HONEST: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "the cat " * 50}], "max_tokens": 4}
HONEST_S, SOON_S = 2.0, 30.0
PATIENCE_S = WAIT_S if LONG else SOON_S
CHAT, MAIN, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
Told = tuple[int, str, float]
OTHERS_KIB = 3 << 20
"""Of the processes that render and tokenize, which have 512 MiB for short texts and twice 2 GiB for others."""


@pytest.fixture(scope="module")
def hostile_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    hostile.write(directory)
    return directory


@pytest.fixture(scope="module")
def beset(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, hostile_dir: Path
) -> Iterator[Server]:
    options = ["--models", str(checkpoints_dir / "llama"), "--models", str(hostile_dir)]
    with attacked(tmp_path_factory.mktemp("beset"), cache, *options) as running:
        yield running


def chat(model: str, content: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}


def ask(server: Server, path: str, body: dict[str, Any], *, leaves: bool) -> Told:
    """Its status, 0 for one that left, with what it was told and when."""
    began_s = time.monotonic()
    try:
        reply = httpx.post(
            server.url + path, json=body, timeout=LEAVE_S if leaves else PATIENCE_S, trust_env=False, verify=False
        )
    except httpx.TimeoutException:
        return 0, "", time.monotonic() - began_s
    message = reply.json()["error"]["message"] if reply.is_error else ""
    return reply.status_code, message, time.monotonic() - began_s


def attack(server: Server, name: str, path: str, body: dict[str, Any], *, all_leave: bool) -> list[Told]:
    with (
        under_attack(server, f"{CLIENTS} at {name}") as report,
        asked_beside(server, CHAT, HONEST) as beside,
    ):
        told = at_once(lambda n: ask(server, path, body, leaves=all_leave or n >= STAYING), CLIENTS)
    assert beside.statuses == {200}
    assert beside.worst_s <= HONEST_S, f"an honest chat took {beside.worst_s:.2f} s"
    assert report.others_peak_kib <= OTHERS_KIB
    return told


@pytest.mark.parametrize("model", first_of(2, list(hostile.TEMPLATES)))
def test_every_model_chats_until_the_word_is_said(beset: Server, model: str) -> None:
    reply = beset.post(CHAT, chat(model, "the cat"))
    assert reply.status_code == httpx.codes.OK, reply.text


@pytest.mark.parametrize("model", first_of(2, list(hostile.TEMPLATES)))
def test_a_template_takes_nothing_from_others(beset: Server, model: str) -> None:
    slow = model in hostile.SLOW
    body = chat(model, hostile.WORD)
    for status, message, took_s in attack(beset, model, CHAT, body, all_leave=slow and not LONG):
        assert (status == 0 and took_s < PATIENCE_S) or 400 <= status <= 503, (status, message, took_s)
        assert "\n" not in message and "\r" not in message and "\u2028" not in message and len(message) <= 500
        assert slow or took_s <= SOON_S


@pytest.mark.parametrize("model", first_of(1, ["loops", "text", "gigabyte"]))
def test_nor_where_it_is_asked_for_tokens(beset: Server, model: str) -> None:
    body = {name: value for name, value in chat(model, hostile.WORD).items() if name != "max_tokens"}
    for status, message, _ in attack(beset, f"{TOKENIZE} of {model}", TOKENIZE, body, all_leave=model in hostile.SLOW):
        assert status == 0 or 400 <= status <= 503, (status, message)


@pytest.mark.parametrize("prompt", first_of(1, [hostile.HANGS, hostile.PANICS]), ids=["panics", "hangs"])
@pytest.mark.parametrize("path", first_of(1, [MAIN, TOKENIZE]))
def test_a_tokenizer_takes_nothing_from_others(beset: Server, path: str, prompt: str) -> None:
    assert beset.post(MAIN, {"model": hostile.REGEX, "prompt": "cats", "max_tokens": 1}).status_code == httpx.codes.OK
    body = {"model": hostile.REGEX, "prompt": prompt} | ({"max_tokens": 1} if path == MAIN else {})
    hangs = prompt is hostile.HANGS
    for status, message, _ in attack(beset, f"{path} of a regex", path, body, all_leave=hangs and not LONG):
        assert status == 0 or 400 <= status <= 503, (status, message)
        assert "\n" not in message and len(message) <= 500


def test_a_model_that_was_attacked_chats_again(beset: Server) -> None:
    for model in hostile.TEMPLATES:
        reply = beset.post(CHAT, chat(model, "the cat"))
        assert reply.status_code == httpx.codes.OK, reply.text


def test_the_log_has_a_line_for_each_and_no_more(beset: Server) -> None:
    assert "Traceback" not in beset.output() and "stack backtrace" not in beset.output()


@pytest.mark.long
def test_it_ends_soon_in_the_middle_of_it(beset: Server) -> None:
    """The last test: it ends the server."""

    def one(number: int) -> object:
        if number == CLIENTS:
            time.sleep(LEAVE_S / 2)  # they have begun
            return ends_soon(beset)
        try:
            return ask(beset, CHAT, chat("loops", hostile.WORD), leaves=False)
        except httpx.TransportError:
            return None

    at_once(one, CLIENTS + 1)
