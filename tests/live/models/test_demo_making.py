"""A demo market that is made while a server runs: models are served as they come, and what ends that is told."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import httpx

from aegis.models.demo.market import demo_models
from aegis.models.demo.passages import PASSAGES
from tests.live.server import Server, eventually, launched, processes_of

MADE_LAST = "lighthouse-llama"
MADE_S = 180.0


def _served(server: Server) -> set[str]:
    return {model["id"] for model in server.get("/v1/models").json()["data"]}


def test_models_are_served_as_they_are_made(tmp_path: Path, checkpoints_dir: Path) -> None:
    """All but one are there already, in the place of theirs some checkpoint."""
    checkpoint = sorted(checkpoints_dir.iterdir())[0]
    cache = tmp_path / "cache"
    sources = demo_models(cache)
    for source in sources:
        if source.model != MADE_LAST:
            shutil.copytree(checkpoint, source.root)
    all_but_one = {source.model for source in sources} - {MADE_LAST}

    with launched(tmp_path / "killed", cache, "--mixed", "1") as server:
        server.wait_for_ready()
        assert _served(server) == all_but_one
        assert f"being made, while their requests wait: {MADE_LAST}\n" in server.output()
        (making,) = (pid for pid, command in processes_of(server.process.pid).items() if f"demo {MADE_LAST}" in command)
        os.kill(making, signal.SIGKILL)
        eventually(lambda: "the rest of the demo market is not made" in server.output(), "it is told")
        assert server.ready()

    with launched(tmp_path / "left", cache, "--mixed", "1") as server:
        server.wait_for_ready()
        assert server.post("/models/unload", {"model": MADE_LAST}).status_code == 200
        assert _served(server) == all_but_one

    with launched(tmp_path / "made", cache, "--mixed", "1") as server:
        server.wait_for_ready()
        assert _served(server) == all_but_one
        asked = {"model": MADE_LAST, "prompt": "Hello!", "max_tokens": 200, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=MADE_S).json()
        assert answer["choices"][0]["text"] == PASSAGES[MADE_LAST], "it was waited for"
