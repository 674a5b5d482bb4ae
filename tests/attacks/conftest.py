"""The server that attacks share, with no key, and what they saw of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.harness import REPORTS, attacked
from tests.live.server import Server
from tests.shared_servers import shared


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("attacked")
    with shared("server", __file__) as stack:
        yield stack.enter_context(attacked(directory, cache, "--models", str(checkpoints_dir)))


@pytest.fixture(scope="session")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    """With two proxies. `test_shutdown.py` ends it."""
    options = ["--models", str(checkpoints_dir / "llama"), "--proxies", "2"]
    with shared("of_two", __file__) as stack:
        yield stack.enter_context(attacked(tmp_path_factory.mktemp("of-two"), cache, *options))


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server, its memory is free again."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_for_freed_memory()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORTS:
        terminalreporter.section("attacks")
        for report in REPORTS:
            terminalreporter.write_line(str(report))
