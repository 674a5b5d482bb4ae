"""A server with keys, limits and two proxies, which tests share, and which `test_limits.py` ends; and the client of the
server without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests import checkpoints
from tests.live.api.keys import ADMIN, ALICE, ALLOWED, AT_ONCE, BOB, CAROL, TOKENS, UNLIMITED
from tests.live.server import Server, launched
from tests.shared_servers import shared


@pytest.fixture(scope="session")
def keyed(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, specs: object
) -> Iterator[Server]:
    """Its configuration is the file `aegis.yaml` beside the directory of its log."""
    directory = tmp_path_factory.mktemp("keyed")
    (directory / "bob").write_text(BOB + "\n")
    long = checkpoints.write(directory / "long", "llama", max_position_embeddings=1 << 15)
    models = {name: {"path": str(checkpoints_dir / name)} for name in ("llama", "qwen2")} | {
        "long": {"path": str(long)}
    }
    keys = {
        "alice": {"key": ALICE, "limits": {"requests_per_minute": ALLOWED}},
        "bob": {"file": "bob", "limits": {"concurrent": AT_ONCE}},
        "carol": {"key": CAROL, "limits": {"tokens_per_minute": TOKENS}},
    }
    config = directory / "aegis.yaml"
    api_keys = keys | {name: {"key": key} for name, key in UNLIMITED.items()}
    config.write_text(json.dumps({"models": models, "api_keys": api_keys, "server": {"shutdown_timeout_s": 60}}))
    options = ["--config", str(config), "--dtype", "float32", "--device-memory", "64MiB", "--proxies", "2"]
    options += ["--log-format", "json", "--cors-origin", "https://chat.example"]
    environment = {"AEGIS_ADMIN_KEY": ADMIN}
    with shared("keyed", __file__) as stack:
        running = stack.enter_context(launched(directory / "server", cache, *options, environment=environment))
        running.wait_for_ready()
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
